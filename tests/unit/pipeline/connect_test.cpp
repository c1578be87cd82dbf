// Communicators whose first message of a way waits for both ends before the rest of its batch is moved, as NCCL's do.
#include <doctest/doctest.h>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include <pleat/comm/run_ranks.hpp>
#include <pleat/comm/thread_arena.hpp>
#include <pleat/core/host/buffer.hpp>
#include <pleat/pipeline.hpp>

using namespace pleat::pipeline;
using namespace std::chrono_literals;
using pleat::DType;

namespace {

class ConnectingComm : public pleat::ThreadComm {
 public:
  /// How many ends of each way, (from, to), have come.
  struct Ways {
    std::mutex mutex;
    std::map<std::pair<int, int>, int> ends;
  };

  ConnectingComm(pleat::ThreadComm comm, Ways& ways) : BasicThreadComm(std::move(comm)), ways_(&ways) {}
  ConnectingComm split(int color, int key) { return {BasicThreadComm::split(color, key), *ways_}; }

  void exchange(std::span<const pleat::Send> tx, std::span<const pleat::Recv> rx, DType dtype, pleat::HostStream s) {
    std::vector<std::pair<int, int>> first;
    for (const pleat::Send& send : tx) come(rank(), send.peer, first);
    for (const pleat::Recv& recv : rx) come(recv.peer, rank(), first);
    for (const auto& way : first) {
      for (const auto end = std::chrono::steady_clock::now() + 2s; ends(way) < 2; std::this_thread::sleep_for(1ms)) {
        if (std::chrono::steady_clock::now() > end) pleat::fail<pleat::comm_error>("a batch is held back");
      }
    }
    BasicThreadComm::exchange(tx, rx, dtype, s);
  }

 private:
  void come(int from, int to, std::vector<std::pair<int, int>>& first) {
    if (std::exchange(has_come_[{from, to}], true)) return;
    const std::lock_guard lock(ways_->mutex);
    ++ways_->ends[{from, to}];
    first.emplace_back(from, to);
  }
  int ends(std::pair<int, int> way) {
    const std::lock_guard lock(ways_->mutex);
    return ways_->ends[way];
  }

  Ways* ways_;
  std::map<std::pair<int, int>, bool> has_come_;
};
static_assert(pleat::communicator<ConnectingComm>);

/// Passes that only carry the number of the micro-batch on.
struct Numbers {
  void forward(pleat::HostStream, const ForwardCall& f) {
    if (f.input.data() != nullptr) CHECK(*f.input.as<double>() == f.micro_batch);
    if (f.output.data() != nullptr) *f.output.as<double>() = f.micro_batch;
  }
  void backward(pleat::HostStream s, const BackwardCall& b) { input_backward(s, b); }
  void input_backward(pleat::HostStream, const BackwardCall& b) {
    if (b.output_gradient.data() != nullptr) CHECK(*b.output_gradient.as<double>() == -b.micro_batch);
    if (b.input_gradient.data() != nullptr) *b.input_gradient.as<double>() = -b.micro_batch;
  }
  void weight_backward(pleat::HostStream, const BackwardCall&) {}
};

}  // namespace

TEST_CASE("no batch is held back by the first message of another way") {
  for (const Kind kind : {Kind::one_f_one_b, Kind::one_f_one_b_pairs, Kind::zb_v, Kind::dualpipe_v}) {
    CAPTURE(name_of(kind));
    for (const int ranks : {2, 4}) {
      ConnectingComm::Ways ways;
      pleat::run_ranks(ranks, [&](pleat::ThreadComm& world) {
        const Schedule schedule = make_schedule(kind, ranks, 2 * ranks);
        const Plan planned =
            plan(schedule, {1, DType::f64, std::vector<std::int64_t>(static_cast<std::size_t>(2 * ranks), 1)});
        const pleat::HostBuffer scratch(planned.footprint().scratch, 0xff);
        ConnectingComm comm(world, ways);
        Numbers model;
        auto op = bind(planned, pleat::HostExecutor(), pleat::GroupComm(comm),
                       pleat::Memory<pleat::HostArena>{.scratch = scratch.block()});
        op.run({}, model);
        op.run({}, model);
      });
    }
  }
}
