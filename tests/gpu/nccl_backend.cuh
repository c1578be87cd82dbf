// NcclComm and NcclArena as backends of the conformance suites: ranks with a GPU each, threads or processes, on owned
// and on borrowed communicators.
#pragma once

#include <pleat/cuda/leaf.cuh>
#include <pleat/nccl/arena.cuh>

#include <conformance/cuda_threads.hpp>

#include "nccl_world.cuh"

namespace nccl_testing {

using namespace std::chrono_literals;

/// One rank, which each process runs, or all of the world's.
struct NcclRanks {
  using comm_type = pleat::NcclComm;
  using arena_type = pleat::NcclArena;
  using Stream = conformance::CudaTestStream;
  using Buffer = conformance::CudaTestBuffer;
  template <class T>
  using Shared = testing_support::Shared<T>;

  static bool has_size(int ranks) {
    return ranks == 1 || (ranks == world_ranks && ranks <= pleat::cuda_device_count());
  }
  static constexpr conformance::Traits traits{
      .compares_calls = false, .awaits_on_host = false, .short_deadline = 600ms, .random_failures = 4};

  template <class F>
  static void run(int ranks, milliseconds deadline, F f) {
    ranks == 1 ? pleat::run_nccl_threads(1, f, {.deadline = deadline}) : run_check(f);
  }
  template <class F>
  static void run_anew(int ranks, milliseconds deadline, F f) {
    ranks == 1 ? pleat::run_nccl_threads(1, f, {.deadline = deadline}) : run_check_anew(f, deadline);
  }
  static std::function<std::string()> status(const pleat::NcclComm&) {
    return [] { return watched_jobs.status(); };
  }
};

/// A communicator that belongs to somebody else: a world has one, but not a world of one rank, which gets its own here.
class Lender {
 public:
  explicit Lender(pleat::NcclComm& world) : comm_(world.native()), is_own_(comm_ == nullptr) {
    const int device = world.device();
    if (is_own_) pleat::check_nccl(ncclCommInitAll(&comm_, 1, &device), "ncclCommInitAll");
  }
  Lender(const Lender&) = delete;
  Lender& operator=(const Lender&) = delete;
  ~Lender() {
    if (is_own_) (void)ncclCommDestroy(comm_);
  }
  ncclComm_t comm() const { return comm_; }

 private:
  ncclComm_t comm_;
  bool is_own_;
};

/// The same on communicators that belong to somebody else.
struct BorrowedNcclRanks : NcclRanks {
  template <class F>
  static void run(int ranks, milliseconds deadline, F f) {
    NcclRanks::run(ranks, deadline, [&](pleat::NcclComm& world) {
      const Lender lender(world);
      pleat::NcclComm borrowed = pleat::NcclComm::borrow(lender.comm(), {.deadline = 20s});
      watched_jobs.call(f, borrowed);
    });
  }
};
static_assert(conformance::backend<NcclRanks> && conformance::backend<BorrowedNcclRanks>);

}  // namespace nccl_testing
