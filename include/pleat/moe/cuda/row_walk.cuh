// How warps share the rows that a kernel moves, and the lists of places that each row has.
#pragma once

#include <cstdint>

#include <pleat/core/dtype.hpp>
#include <pleat/moe/cuda/warp.cuh>
#include <pleat/moe/dispatch_plan.hpp>

namespace pleat::inline v0::moe::detail {

inline __device__ std::int64_t payload_bytes_of(const DispatchPlan& plan) {
  return plan.shape.hidden * static_cast<std::int64_t>(size_bytes(plan.shape.dtype));
}

/// This warp among those of the grid, and how many there are.
struct WarpOfGrid {
  std::int64_t index = (static_cast<std::int64_t>(blockIdx.x) * row_threads + threadIdx.x) / 32;
  std::int64_t count = static_cast<std::int64_t>(gridDim.x) * (row_threads / 32);
};

/// This warp's share of the rows of tokens.
class TokenRows {
 public:
  __device__ TokenRows(std::int64_t tokens, const std::byte* x, std::int64_t row_bytes)
      : tokens_(tokens), x_(x), row_bytes_(row_bytes), token_(warp_.index) {}
  __device__ bool exists() const { return token_ < tokens_; }
  __device__ void advance() { token_ += warp_.count; }
  __device__ const std::byte* source() const { return x_ + token_ * row_bytes_; }
  __device__ std::int64_t token() const { return token_; }

 private:
  std::int64_t tokens_;
  const std::byte* x_;
  std::int64_t row_bytes_;
  WarpOfGrid warp_;
  std::int64_t token_;
};

/// This warp's share of the rows that came from all ranks, or from some, and where they lie in a table. Neighbours take
/// rows of different sources, so that all links are busy at once.
class ReceivedRows {
 public:
  __device__ ReceivedRows(const DispatchPlan& plan, const DispatchRecord& r, const RowTable& table)
      : plan_(&plan), record_(&r), table_(&table), sources_(plan.ranks), at_(warp_.index) {
    find();
  }
  __device__ ReceivedRows(const DispatchPlan& plan, const DispatchRecord& r, const SourceRows& in)
      : plan_(&plan),
        record_(&r),
        table_(&in.table),
        tokens_(static_cast<std::byte*>(const_cast<void*>(in.tokens))),
        sources_(in.are_own ? 1 : plan.ranks - 1),
        first_(in.are_own ? in.rank : 0),
        skipped_(in.are_own ? plan.ranks : in.rank),
        at_(warp_.index) {
    find();
  }
  __device__ bool exists() const { return at_ < sources_ * plan_->shape.max_tokens; }
  __device__ void advance() {
    at_ += warp_.count;
    find();
  }
  /// The row's payload.
  __device__ std::byte* source() const {
    if (tokens_ == nullptr) return table_->payload(rank_, slot_);
    return tokens_ + record_->own_tokens[slot_] * payload_bytes_of(*plan_);
  }
  __device__ std::byte* header() const { return table_->header(rank_, slot_); }
  __device__ std::int64_t number() const { return rank_ * plan_->shape.max_tokens + slot_; }

 private:
  __device__ void find() {
    for (; exists(); at_ += warp_.count) {
      slot_ = at_ / sources_;
      rank_ = first_ + static_cast<int>(at_ - slot_ * sources_);
      rank_ += rank_ >= skipped_ ? 1 : 0;
      if (slot_ < record_->recv_counts[rank_]) return;
    }
  }

  const DispatchPlan* plan_;
  const DispatchRecord* record_;
  const RowTable* table_;
  std::byte* tokens_ = nullptr;
  int sources_, first_ = 0, skipped_ = 0x7fffffff;
  WarpOfGrid warp_;
  std::int64_t at_, slot_ = 0;
  int rank_ = 0;
};

/// Up to 32 items of a row's list, one per lane: longer lists go piece by piece.
template <class Value>
struct LaneList {
  int count = 0;  ///< of all lanes
  Value value{};  ///< of this lane

  __device__ Value of_lane(int i) const {
    static_assert(sizeof(Value) == 8);
    return __builtin_bit_cast(Value, __shfl_sync(whole_warp, __builtin_bit_cast(std::int64_t, value), i));
  }
};
/// The items [first, first + 32) of a list of at most `length`, which the first that does not exist ends.
template <class Value, class Exists>
__device__ LaneList<Value> load_list(const Value* items, int first, int length, const Exists& exists) {
  LaneList<Value> list;
  const int at = first + lane_of_thread();
  bool ends = true;
  if (at < length) {
    list.value = items[at];
    ends = !exists(list.value);
  }
  const unsigned ended = __ballot_sync(whole_warp, ends);
  list.count = ended == 0 ? 32 : __ffs(static_cast<int>(ended)) - 1;
  return list;
}
/// The rows that a token is sent as.
inline __device__ LaneList<SentRow> sent_list(const DispatchPlan& plan, const DispatchRecord& r, std::int64_t token,
                                              int first) {
  return load_list(r.sent + token * plan.max_sends(), first, plan.max_sends(),
                   [](SentRow row) { return row.rank >= 0; });
}
/// The expert-major rows of a received row.
inline __device__ LaneList<std::int64_t> entry_list(const DispatchPlan& plan, const DispatchRecord& r,
                                                    std::int64_t number, int first) {
  return load_list(r.entry_rows + number * plan.max_entries(), first, plan.max_entries(),
                   [](std::int64_t row) { return row >= 0; });
}

}  // namespace pleat::inline v0::moe::detail
