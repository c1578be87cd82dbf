// Reproducible sums over ranks, written once: move all terms, then add them in rank order.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>
#include <vector>

#include <pleat/comm/group_comm.hpp>
#include <pleat/core/carve.hpp>

namespace pleat::inline v0 {

namespace detail {
/// A value per rank, which up to 256 ranks allocate nothing for: sums stand in hot paths.
template <class T>
class RankArray {
 public:
  explicit RankArray(std::size_t ranks) : size_(ranks) {
    if (ranks > few_.size()) many_.resize(ranks);
  }
  std::span<T> get() { return {many_.empty() ? few_.data() : many_.data(), size_}; }

 private:
  std::size_t size_;
  std::array<T, 256> few_;
  std::vector<T> many_;
};
}  // namespace detail

/// How `elems` elements fall to `counts.size()` ranks: the first `elems % ranks` get one more.
inline void balance_counts(std::size_t elems, std::span<std::size_t> counts) {
  for (std::size_t r = 0; r < counts.size(); ++r) counts[r] = elems / counts.size() + (r < elems % counts.size());
}
inline std::vector<std::size_t> balanced_counts(std::size_t elems, int ranks) {
  std::vector<std::size_t> counts(static_cast<std::size_t>(ranks));
  balance_counts(elems, counts);
  return counts;
}

/// Bytes of scratch `reduce_scatter_ordered` needs on a rank that keeps `elems` elements.
constexpr std::size_t reduce_scatter_scratch_bytes(std::size_t elems, int ranks, DType wire) {
  Carver memory;
  memory.take_bytes(elems * static_cast<std::size_t>(ranks) * size_bytes(wire));
  return memory.used_bytes();
}

/// out[counts[rank]] = (accumulate ? out : 0) + sum over ranks r, in rank order, of r's elements for me. Collective.
/// `in` [sum of counts] is packed in rank order, of dtype `wire`; `out` is of dtype `out_dtype`; the sum runs in
/// accumulator_t of the wider one. Moves (ranks - 1) * counts[rank] elements in and as many out as the others keep.
template <communicator Comm>
void reduce_scatter_ordered(const GroupComm<Comm>& comm, const void* in, DType wire, Counts counts, void* out,
                            DType out_dtype, bool accumulate, Block scratch, typename Comm::stream_type s) {
  using leaf = core_leaf<typename Comm::device_type>;
  const auto ranks = static_cast<std::size_t>(comm.size());
  const std::size_t mine = counts[static_cast<std::size_t>(comm.rank())];
  detail::RankArray<std::size_t> recv(ranks);
  std::fill(recv.get().begin(), recv.get().end(), mine);
  auto* parts = Carver(scratch).take_bytes(mine * ranks * size_bytes(wire));
  comm.all_to_all_v(in, counts, parts, recv.get(), wire, s);
  detail::RankArray<const void*> terms(ranks);
  for (std::size_t r = 0; r < ranks; ++r) terms.get()[r] = parts + r * mine * size_bytes(wire);
  leaf::sum_ranks(out, out_dtype, terms.get(), wire, mine, accumulate, s);
}

/// Bytes of scratch `all_reduce_ordered` needs.
constexpr std::size_t all_reduce_scratch_bytes(std::size_t elems, int ranks, DType dtype) {
  const auto n = static_cast<std::size_t>(ranks);
  return reduce_scatter_scratch_bytes((elems + n - 1) / n, ranks, dtype) +
         reduce_scatter_scratch_bytes((elems + n - 1) / n, 1, dtype);
}

/// buffer[elems] = sum over ranks of their buffers, in rank order; the same bits on every rank. Collective.
/// A reduce-scatter over balanced parts and an all-gather: 2 (ranks - 1) / ranks * elems elements each way.
template <communicator Comm>
void all_reduce_ordered(const GroupComm<Comm>& comm, void* buffer, std::size_t elems, DType dtype, Block scratch,
                        typename Comm::stream_type s) {
  if (comm.size() == 1) return;
  detail::RankArray<std::size_t> balanced(static_cast<std::size_t>(comm.size()));
  const std::span<std::size_t> counts = balanced.get();
  balance_counts(elems, counts);
  const std::size_t most = counts.front();
  Carver memory(scratch);
  const std::size_t parts_bytes = reduce_scatter_scratch_bytes(most, comm.size(), dtype);
  const Block parts{memory.take_bytes(parts_bytes), parts_bytes};
  auto* sum = memory.take_bytes(most * size_bytes(dtype));
  reduce_scatter_ordered(comm, buffer, dtype, counts, sum, dtype, false, parts, s);
  comm.all_gather_v(sum, buffer, counts, dtype, s);
}

}  // namespace pleat::inline v0
