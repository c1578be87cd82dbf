// Rank-ordered sums: how elements fall to ranks, how much scratch they take, and what few numbers give.
#include <pleat/comm/ordered_sum.hpp>
#include <pleat/comm/run_ranks.hpp>
#include <pleat/core/host/buffer.hpp>
#include <pleat/core/host/leaf.hpp>

#include <numeric>
#include <vector>

#include <doctest/doctest.h>

namespace {

using namespace pleat;

TEST_CASE("balanced_counts gives every element to one rank, the first ones to more") {
  for (int ranks = 1; ranks <= 9; ++ranks) {
    for (std::size_t elems = 0; elems <= 40; ++elems) {
      const std::vector<std::size_t> counts = balanced_counts(elems, ranks);
      REQUIRE(counts.size() == static_cast<std::size_t>(ranks));
      REQUIRE(std::accumulate(counts.begin(), counts.end(), std::size_t{0}) == elems);
      REQUIRE(std::is_sorted(counts.rbegin(), counts.rend()));
      REQUIRE(counts.front() - counts.back() <= 1);
    }
  }
}

TEST_CASE("scratch") {
  static_assert(reduce_scatter_scratch_bytes(0, 8, DType::f32) == 0);
  static_assert(reduce_scatter_scratch_bytes(32, 4, DType::f32) == 512);
  static_assert(reduce_scatter_scratch_bytes(33, 4, DType::bf16) == 384);
  CHECK(all_reduce_scratch_bytes(128, 4, DType::f32) == 512 + 128);
  CHECK(all_reduce_scratch_bytes(129, 4, DType::f32) == 640 + 256);
}

// source: facts/fsdp.json, `precision.ring_bf16_256_plus_ones`.
TEST_CASE("256 and seven ones in bfloat16") {
  run_ranks(8, [](ThreadComm& world) {
    const GroupComm<ThreadComm> comm(world);
    const bfloat16 mine(world.rank() == 0 ? 256.0f : 1.0f);
    const std::vector<bfloat16> in(8, mine);
    const std::vector<std::size_t> counts(8, 1);
    const HostBuffer scratch(all_reduce_scratch_bytes(8, 8, DType::bf16), 0xff);
    float sum = 0;
    reduce_scatter_ordered(comm, in.data(), DType::bf16, counts, &sum, DType::f32, false, scratch.block(), {});
    if (sum != 263.0f) fail<comm_error>("float sum");
    bfloat16 rounded = mine;
    all_reduce_ordered(comm, &rounded, 1, DType::bf16, scratch.block(), {});
    if (rounded != 264.0f) fail<comm_error>("bfloat16 sum");
  });
}

TEST_CASE("a group of one: a reduce-scatter casts and accumulates, an all-reduce changes nothing") {
  const GroupComm<ThreadComm> alone;
  const bfloat16 in[] = {bfloat16(1.5f), bfloat16(-2.0f)};
  const std::size_t counts[] = {2};
  const HostBuffer scratch(reduce_scatter_scratch_bytes(2, 1, DType::bf16), 0xff);
  float out[] = {10, 20};
  reduce_scatter_ordered(alone, in, DType::bf16, counts, out, DType::f32, true, scratch.block(), {});
  CHECK(out[0] == 11.5f);
  CHECK(out[1] == 18.0f);
  reduce_scatter_ordered(alone, in, DType::bf16, counts, out, DType::f32, false, scratch.block(), {});
  CHECK(out[1] == -2.0f);
  all_reduce_ordered(alone, out, 2, DType::f32, {}, {});
  CHECK(out[0] == 1.5f);
}

}  // namespace
