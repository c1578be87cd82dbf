// The host backend of the conformance suites: ranks are threads, device memory is the host's.
#pragma once

#include <pleat/comm/run_ranks.hpp>
#include <pleat/core/host/buffer.hpp>

#include <conformance/site.hpp>

namespace conformance {

/// What each rank of the run of `comm` did last.
template <pleat::polling_executor Executor>
std::function<std::string()> last_operations(const pleat::BasicThreadComm<Executor>& comm) {
  return [world = comm.world()] {
    std::string text;
    for (int r = 0; r < world->ranks(); ++r) {
      text += (r == 0 ? "" : ", ") + std::string("rank ") + std::to_string(r) + ": " + world->last_operation(r);
    }
    return text;
  };
}

struct HostThreads {
  using comm_type = pleat::ThreadComm;

  struct Stream {
    pleat::HostStream get() const { return {}; }
  };
  class Buffer {
   public:
    explicit Buffer(std::size_t bytes) : memory_(bytes, 0xff) {}
    pleat::Block block() const { return memory_.block(); }
    void upload(const std::byte* source) {
      pleat::HostExecutor{}.copy(memory_.data(), source, memory_.size_bytes(), {});
    }
    void download(std::byte* target) const {
      pleat::HostExecutor{}.copy(target, memory_.data(), memory_.size_bytes(), {});
    }

   private:
    pleat::HostBuffer memory_;
  };

  static constexpr Traits traits{};
  template <class T>
  using Shared = InProcess<T>;

  template <class F>
  static void run(int ranks, milliseconds deadline, F f) {
    pleat::run_ranks(ranks, f, {.deadline = deadline});
  }
  template <class F>
  static void run_anew(int ranks, milliseconds deadline, F f) {
    run(ranks, deadline, f);
  }
  static std::function<std::string()> status(const pleat::ThreadComm& comm) { return last_operations(comm); }
};
static_assert(backend<HostThreads>);

}  // namespace conformance
