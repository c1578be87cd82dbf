// The peer collectives of ranks that are threads and share GPUs, which have copies only, against CudaThreadComm. Stores
// need a GPU per rank: gpu/peer_collectives_test.cu.
#include <pleat/comm/ordered_sum.hpp>
#include <pleat/comm/peer_reduce_scatter.hpp>
#include <pleat/cuda/leaf.cuh>
#include <pleat/cuda/peer_collectives.cuh>
#include <pleat/cuda/thread_comm.hpp>

#include <random>

#include <doctest/doctest.h>

#include <conformance/cuda_threads.hpp>

#include <support/copy_now.hpp>

namespace {

using namespace pleat;
using conformance::Bytes;
using conformance::CudaTestBuffer;
using conformance::pattern;
using conformance::require_equal;

Bytes read(const std::byte* data, std::size_t bytes) {
  Bytes result(bytes);
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  testing_support::copy_now(result.data(), data, bytes);
  return result;
}

/// Half of the time results stay in use during the next call.
void many_calls(CudaThreadComm& world) {
  const GroupComm<CudaThreadComm> comm(world);
  const auto n = static_cast<std::size_t>(world.size());
  constexpr std::size_t most = 3001;
  const PeerCollectivesPlan plan = plan_peer_collectives(world.size(), most, {.stores = {}, .beside_bytes = 500});
  CudaThreadArena arena(comm, plan.footprint().symmetric);
  const CudaStream compute, side;
  const Streams<cudaStream_t> s{compute, side};
  auto op = bind(plan, CudaExecutor{}, comm, Memory<CudaThreadArena>{.arena = &arena}, compute);
  CudaTestBuffer in(n * most), out(n * most);
  std::mt19937 random(7);
  int in_use = 0;
  for (unsigned round = 0; round < 60; ++round) {
    const std::size_t bytes = random() % (most + 1);
    const bool is_gather = random() % 2 == 0, keeps = random() % 2 == 0;
    Bytes mine = pattern(n * most, world.rank(), 0, round);
    in.upload(mine.data());
    const std::byte* const result = is_gather ? op.all_gather(in.block().data, bytes, DType::u8, s)
                                              : op.all_to_all(in.block().data, bytes, DType::u8, s);
    ++in_use;
    is_gather ? world.all_gather(in.block().data, out.block().data, bytes, DType::u8, compute)
              : world.all_to_all(in.block().data, out.block().data, bytes, DType::u8, compute);
    require_equal(read(result, n * bytes), read(out.block().data, n * bytes), "round ", round);
    for (; in_use > (keeps ? 1 : 0); --in_use) op.release(s);
  }
}

void many_sums(CudaThreadComm& world) {
  const GroupComm<CudaThreadComm> comm(world);
  const auto n = static_cast<std::size_t>(world.size());
  constexpr std::size_t most = 1003;
  const PeerReduceScatterPlan plan{.ranks = world.size(), .block_elems = most, .wire = DType::bf16};
  CudaThreadArena arena(comm, plan.footprint().symmetric);
  const CudaStream s;
  auto op = bind(plan, CudaExecutor{}, comm, Memory<CudaThreadArena>{.arena = &arena}, s);
  CudaTestBuffer found(most * sizeof(float)), expected(most * sizeof(float));
  CudaTestBuffer scratch(reduce_scatter_scratch_bytes(most, world.size(), DType::bf16));
  for (unsigned round = 0; round < 20; ++round) {
    const std::size_t elems = most - round * 50;
    std::vector<bfloat16> terms(n * elems);
    std::mt19937 random(100 * round + static_cast<unsigned>(world.rank()));
    std::normal_distribution<float> normal(0, 100);
    for (bfloat16& term : terms) term = bfloat16(normal(random));
    std::byte* const input = op.input(s);
    check_cuda(cudaMemcpyAsync(input, terms.data(), terms.size() * sizeof(bfloat16), cudaMemcpyHostToDevice, s),
               "cudaMemcpyAsync");
    const std::vector<std::size_t> counts(n, elems);
    reduce_scatter_ordered(comm, input, DType::bf16, counts, expected.block().data, DType::f32, round % 2 == 1,
                           scratch.block(), s);
    op.reduce_scatter(found.block().data, DType::f32, elems, round % 2 == 1, s);
    require_equal(read(found.block().data, elems * sizeof(float)), read(expected.block().data, elems * sizeof(float)),
                  "round ", round);
  }
}

TEST_CASE("collectives of thread ranks on GPUs") {
  for (const int ranks : {1, 2, 3, 5, 8}) {
    const testing_support::Watchdog watchdog("peer collectives of thread ranks");
    run_cuda_ranks(ranks, many_calls);
    run_cuda_ranks(ranks, many_sums);
  }
}

}  // namespace
