// Rows through a ring of shared memory: the copy engine fetches what a warp needs next and takes away what it leaves,
// so that few CTAs fill a link and many fill the memory's bandwidth.
#pragma once

#include <cstdint>

#include <pleat/cuda/hopper/tma.cuh>
#include <pleat/moe/cuda/warp.cuh>

namespace pleat::inline v0::moe::detail {

/// Of a CTA of `row_threads`; each warp has a ring of its own.
struct RowRing {
  static constexpr int warps = row_threads / 32;
  static constexpr int stages = 3;
  static constexpr int stage_bytes = 4096;
  static constexpr int shared_bytes = warps * stages * stage_bytes;

  /// `memory` [shared_bytes] is the CTA's, `barriers` [warps * stages] too. All threads of the CTA.
  __device__ RowRing(std::byte* memory, hopper::Barrier* barriers)
      : stage_(memory + threadIdx.x / 32 * stages * stage_bytes), full_(barriers + threadIdx.x / 32 * stages) {
    if (lane_of_thread() < stages) full_[lane_of_thread()].init(1);
    hopper::fence_barrier_init();
    __syncthreads();
  }

  /// Runs a warp's work: `ahead` and `use` are two copies of a cursor over the same pieces, each at most `stage_bytes`
  /// long. A cursor has `exists()`, `advance()`, `bytes()`, what the copy engine is to fetch, and `fetch(stage, full)`,
  /// which asks for it; all lanes call all of them. `f(use, stage)` may give the stage to the copy engine and commit.
  template <class Cursor, class F>
  __device__ void run(Cursor ahead, Cursor use, const F& f) {
    hopper::Cycle<stages> filled, used;
    const auto fill = [&] {
      if (!ahead.exists()) return;
      hopper::Barrier& full = full_[filled.stage];
      if (lane_of_thread() == 0) full.arrive_expecting(ahead.bytes());
      __syncwarp();
      ahead.fetch(stage_ + filled.stage * stage_bytes, full);
      ahead.advance();
      filled.advance();
    };
    for (int i = 0; i < stages - 1; ++i) fill();
    while (use.exists()) {
      full_[used.stage].wait(used.parity);
      f(use, stage_ + used.stage * stage_bytes);
      use.advance();
      used.advance();
      hopper::wait_stores_read<1>();  // the stage before this one has been read
      __syncwarp();
      fill();
    }
    hopper::wait_stores<0>();
  }

 private:
  std::byte* stage_;
  hopper::Barrier* full_;
};

/// A cursor over the pieces of the rows of a cursor `Rows`, each fetched whole from `source()`.
template <class Rows>
class RowPieces {
 public:
  __device__ RowPieces(const Rows& rows, std::int64_t row_bytes) : rows_(rows), row_bytes_(row_bytes) {}

  __device__ bool exists() const { return rows_.exists(); }
  __device__ void advance() {
    offset_ += RowRing::stage_bytes;
    if (offset_ < row_bytes_) return;
    offset_ = 0;
    rows_.advance();
  }
  __device__ std::uint32_t bytes() const {
    const std::int64_t rest = row_bytes_ - offset_;
    return static_cast<std::uint32_t>(rest < RowRing::stage_bytes ? rest : RowRing::stage_bytes);
  }
  __device__ void fetch(std::byte* stage, hopper::Barrier& full) const {
    if (lane_of_thread() == 0) hopper::load_bytes(stage, rows_.source() + offset_, full, bytes());
  }

  __device__ const Rows& rows() const { return rows_; }
  __device__ std::int64_t offset() const { return offset_; }

 private:
  Rows rows_;
  std::int64_t row_bytes_, offset_ = 0;
};

/// A cursor over pieces of which each has the same columns of several rows, side by side: lane i has the address of the
/// i-th of `sources()` rows, at most 32.
template <class Rows>
class SidePieces {
 public:
  __device__ SidePieces(const Rows& rows, std::int64_t row_bytes) : rows_(rows), row_bytes_(row_bytes) { begin_row(); }

  __device__ bool exists() const { return rows_.exists(); }
  __device__ void advance() {
    offset_ += pitch_;
    if (offset_ < row_bytes_) return;
    rows_.advance();
    begin_row();
  }
  __device__ std::uint32_t bytes() const { return static_cast<std::uint32_t>(rows_.sources()) * piece_bytes(); }
  __device__ void fetch(std::byte* stage, hopper::Barrier& full) const {
    const int lane = lane_of_thread();
    if (lane < rows_.sources())
      hopper::load_bytes(stage + lane * pitch_, rows_.source() + offset_, full, piece_bytes());
  }

  __device__ const Rows& rows() const { return rows_; }
  __device__ std::int64_t offset() const { return offset_; }
  /// Of each row's part, and from one to the next in the stage.
  __device__ std::uint32_t piece_bytes() const {
    const std::int64_t rest = row_bytes_ - offset_;
    return static_cast<std::uint32_t>(rest < pitch_ ? rest : pitch_);
  }
  __device__ int pitch() const { return pitch_; }
  __device__ bool ends_row() const { return offset_ + pitch_ >= row_bytes_; }

 private:
  __device__ void begin_row() {
    offset_ = 0;
    pitch_ = RowRing::stage_bytes;
    if (rows_.exists() && rows_.sources() > 1) pitch_ = RowRing::stage_bytes / rows_.sources() / 16 * 16;
  }

  Rows rows_;
  std::int64_t row_bytes_, offset_ = 0;
  int pitch_ = 0;
};

}  // namespace pleat::inline v0::moe::detail
