// Sharded training on two GPUs, ranks as threads and as processes: the bits of the host in every run, whatever is late,
// whatever else occupies the GPU and however many multiprocessors sums have; the same from a captured graph, and a
// clear error where none can be captured; the same with one hardware queue per GPU; and steps that allocate nothing.
// Exit code 77 where there are fewer than two GPUs.
#define DOCTEST_CONFIG_DISABLE  // the backends of the conformance suites serve here without the suites
#include <pleat/fsdp/sharded_model.hpp>
#include <pleat/optim/adamw.hpp>
#include <pleat/optim/cuda/leaf.cuh>
#include <pleat/optim/step_norm.hpp>

#include <support/allocation_counter.hpp>

#include "fsdp_fuzz.cuh"
#include "nccl_backend.cuh"
#include "nccl_runner.hpp"
#include "skip.hpp"
#include "two_gpus.cuh"

namespace {

using namespace templates_testing;
using conformance::require;

constexpr int two = 2;

struct GraphRanks : nccl_testing::NcclRanks {
  using Graph = two_gpus::Graph;
};

/// Ranks that meet on the host cannot be captured.
void check_refusal() {
  using Ranks = conformance::CudaThreads<1>;
  Ranks::run(two, 20s, [](CudaThreadComm& world) {
    const MeshComms comms(RuntimeMesh::fold({.world = two}), world);
    const auto groups = fsdp::groups_of(comms);
    const CudaStream s;
    for (const Transport transport : {Transport::peer, Transport::collective}) {
      const fsdp::Plan plan = fsdp::plan(fsdp_testing::odd_model({}), groups.sizes(), {.transport = transport});
      const CudaBuffer persistent(plan.footprint().persistent);
      CudaThreadArena arena(comms.world(), plan.footprint().symmetric);
      auto op = fsdp::bind(plan, CudaExecutor{}, groups,
                           Memory<CudaThreadArena>{.persistent = persistent.block(), .arena = &arena}, s);
      std::string text;
      try {
        op.fork({s, s, s});
      } catch (const shape_error& e) {
        text = e.what();
      }
      require(text.find("pleat[F17]: fork over") == 0, "threads of one GPU: fork over ", name_of(transport),
              " says: ", text.c_str());
      world.wait(s);
      world.barrier(s);
      world.wait(s);
    }
  });
  std::printf("ok      a graph of ranks that meet on the host is refused\n");
}

/// Counts what a step allocates on the host with new, and what is left of the GPU's memory: from the second on nothing,
/// with the norm and AdamW, on both transports.
void check_allocations() {
  const auto check = [](NcclComm& world, Transport transport) {
    const CudaStream compute, gather, reduce(first_priority()), own;
    const std::vector<fsdp::UnitSpec> units(
        3, {.name = "unit", .params = {{.name = "w", .shape = {70, 50}}, {.name = "b", .shape = {9}}}});
    fsdp::ShardedModel<NcclComm, NcclArena> model(world, units, {compute, gather, reduce, own},
                                                  {.transport = transport});
    const auto shards = model.sharder().shards();
    const auto adamw_plan = optim::plan_adamw(model.plan().layouts, model.plan().master);
    const auto norm_plan = optim::plan_step_norm(world.size());
    const CudaBuffer moments(adamw_plan.footprint().persistent), totals(norm_plan.footprint().persistent);
    auto adamw = optim::bind(adamw_plan, CudaExecutor{}, Memory<>{.persistent = moments.block()}, compute);
    auto norm = optim::bind(norm_plan, CudaExecutor{}, GroupComm<NcclComm>(world),
                            Memory<>{.persistent = totals.block()}, compute);
    const optim::StepSums sums{.loss = 1, .tokens = 1};
    const auto step = [&] {
      model.begin_step();
      for (int u = 0; u < 3; ++u) model.forward(u, [](const auto&) {});
      for (int u = 2; u >= 0; --u) {
        model.backward(u, [](const auto&, auto& gradients) { (void)gradients.add_to(0); });
      }
      model.finish_step([](const auto&, int) {});
      CudaExecutor{}.copy(norm.sums(), &sums, sizeof sums, compute);
      adamw.step(shards, norm.run(shards, 1, compute), 1e-3, compute);
      model.sharder().weights_changed({compute, gather, reduce, own});
      model.wait();
    };
    const auto free_bytes = [] {
      std::size_t left = 0, total = 0;
      check_cuda(cudaMemGetInfo(&left, &total), "cudaMemGetInfo");
      return left;
    };
    step();
    const std::size_t left = free_bytes();
    for (int again = 0; again < 3; ++again) {
      const std::int64_t count = testing_support::allocations_of(step);
      require(count == 0, "a step over ", name_of(transport), " transport allocates ", count, " times on the host");
    }
    require(free_bytes() == left, "steps over ", name_of(transport), " transport took memory of the GPU");
  };
  for (const Transport transport : {Transport::peer, Transport::collective}) {
    nccl_testing::run_check([&](NcclComm& world) { check(world, transport); });
  }
}

/// `queues`: hardware queues of each GPU; 0: as many as it has. Five runs have a world, since a world keeps the
/// communicators that were split from it, 1 GB of each training, to its end.
void check_trainings(int runs, bool with_graphs, int queues) {
  if (queues != 0) setenv("CUDA_DEVICE_MAX_CONNECTIONS", std::to_string(queues).c_str(), 1);
  constexpr int most = 5;  // each stream is late once
  for (int left = runs; left > 0; left -= most) {
    if (with_graphs) {
      check_runs<GraphRanks>("from graphs", fuzzed_trainings(two, true), std::min(left, most));
    } else {
      check_runs<nccl_testing::NcclRanks>("late streams, noise, budgets", fuzzed_trainings(two, false),
                                          std::min(left, most));
    }
    nccl_testing::end_world();
  }
}

std::vector<nccl_testing::Case> cases() {
  std::vector<nccl_testing::Case> all;
  const int runs = testing_support::repeats(10);  // of seven trainings
  const auto add = [&](const std::string& name, bool is_processes, std::function<void()> run) {
    all.push_back({(is_processes ? "processes: " : "threads: ") + name, is_processes,
                   [run] {
                     run();
                     nccl_testing::end_world();
                   },
                   120});
  };
  add("what cannot be in a graph", false, check_refusal);
  for (const bool is_processes : {false, true}) {
    add("steps allocate nothing", is_processes, check_allocations);
    add("late streams, noise, budgets", is_processes, [=] { check_trainings(runs, false, 0); });
    add("from graphs", is_processes, [=] { check_trainings(std::max(1, runs / 2), true, 0); });
    // Without graphs: their branches would enter the one queue in an order that nobody chooses.
    add("with one hardware queue", is_processes, [=] { check_trainings(std::max(1, runs / 2), false, 1); });
  }
  return all;
}

}  // namespace

/// `nccl_fsdp_test [part of the name of cases]`.
int main(int argc, char** argv) {
  // A kernel that is loaded at its first launch may wait for the device, and so for a peer.
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  setenv("NCCL_NVLS_ENABLE", "0", 1);
  setenv("PLEAT_TEST_SEED", std::to_string(std::random_device{}()).c_str(), 0);  // one for all processes
  if (argc == 3 && std::strcmp(argv[1], "--case") == 0) return nccl_testing::run_case(cases(), argv[2]);
  if (gpu_testing::lacks_gpus(two)) return gpu_testing::skipped;
  return nccl_testing::run_all(cases(), "/proc/self/exe", argc > 1 ? argv[1] : "");
}
