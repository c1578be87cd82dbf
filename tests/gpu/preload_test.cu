// Kernels that are loaded when they are first launched: binds leave none of the library's for later, and ranks whose
// peers are late get by. Exit code 77 where there are fewer than two GPUs.
#include <pleat/cuda/peer_collectives.cuh>
#include <pleat/cuda/peer_sums.cuh>

#include <gpu/loaded_kernels.hpp>
#include <gpu/two_gpus_main.cuh>

namespace {

using namespace two_gpus;
using pleat::DType;
using Collectives = pleat::PeerCollectives<pleat::CudaExecutor, MappedPeers, pleat::MappedStores>;
using Sums = pleat::PeerReduceScatter<pleat::CudaExecutor, MappedPeers, pleat::MappedSums>;
using leaf = pleat::core_leaf<pleat::cuda_device>;

__global__ void marker() {}

std::string binds(Rank& site) {
  const CudaStream s;
  const auto unloaded = [] { return gpu_testing::holding(gpu_testing::unloaded_kernels(marker), "5pleat"); };
  const std::size_t before = unloaded().size();
  require(before > 40, "kernels are loaded by themselves: " + std::to_string(before) + " are left");
  const auto plan = pleat::plan_peer_collectives<pleat::MappedStores>(ranks, 4096);
  const pleat::CudaBuffer persistent(plan.footprint().persistent);
  const Collectives collectives(plan, {}, site.open(plan.footprint().symmetric, plan.channels()), persistent.block(),
                                5s, s);
  const auto sums = pleat::plan_peer_reduce_scatter<pleat::MappedSums>(ranks, 1024);
  const pleat::CudaBuffer memory(sums.footprint().persistent);
  const Sums sum(sums, site.open(sums.footprint().symmetric, sums.channels()), memory.block(), 5s, s);
  site.wait(s);
  for (const std::string& name : unloaded()) require(false, name + " is not loaded at bind");
  return std::to_string(before) + " kernels";
}

/// Rank 0 launches every kind of kernel of the core leaf for the first time while another of its streams waits for its
/// peer, which waits for what these kernels are followed by.
std::string first_launches_while_waiting(Rank& site) {
  pleat::preload_leaves<leaf>();
  MappedPeers peers = site.open(0, 2);
  const CudaStream waiting, working;
  constexpr std::size_t elems = 1000;
  const pleat::CudaBuffer data(2 * elems * sizeof(double)), scratch(leaf::sum_of_squares_scratch_bytes);
  pleat::CudaExecutor{}.zero(data.data(), data.size_bytes(), working);
  site.wait(working);
  const void* const parts[] = {data.data(), data.data()};
  if (site.rank == 0) {
    peers.await(1, 0, waiting);
    for (const DType out : {DType::f64, DType::f32, DType::bf16}) {
      for (const DType in : {DType::f64, DType::f32, DType::bf16}) {
        leaf::cast_copy(data.data() + elems * sizeof(double), out, data.data(), in, elems, working);
        leaf::sum_ranks(data.data() + elems * sizeof(double), out, parts, in, elems, false, working);
      }
      leaf::sum_of_squares(reinterpret_cast<double*>(data.data()), data.data() + 16, out, elems, false, scratch.data(),
                           working);
    }
    peers.signal(1, 1, working);
  } else {
    std::this_thread::sleep_for(200ms);
    peers.await(0, 1, waiting);
    peers.signal(0, 0, waiting);
  }
  site.wait(waiting);
  site.wait(working);
  return "";
}

constexpr Case cases[] = {
    {"binds load", binds},
    {"first launches", first_launches_while_waiting},
};
constexpr Way lazy_ways[] = {
    {.name = "threads", .is_processes = false, .loads_lazily = true},
    {.name = "processes", .is_processes = true, .loads_lazily = true},
};

}  // namespace

int main() {
  return run_all(cases, lazy_ways);
}
