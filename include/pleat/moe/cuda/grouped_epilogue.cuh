// From the sums of a tile to results in device memory: rounded, through the activation or its gradient, staged in
// shared memory and stored by the copy engine.
#pragma once

#include <cstdint>

#include <pleat/moe/cuda/grouped_shared.cuh>

namespace pleat::inline v0::moe::detail {

__device__ inline float fast_sigmoid(float x) {
  return __fdividef(1.0f, 1.0f + __expf(-x));
}
__device__ inline float2 floats_of(std::uint32_t pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
}

/// One warp group's half of the tile, 64 rows; `sums` as wgmma leaves them.
template <Grouped Op>
class GroupedEpilogue {
 public:
  __device__ GroupedEpilogue(const GroupedArguments& args, GroupedShared<Op>& shared, int group)
      : args_(args), shared_(shared), group_(group), thread_(static_cast<int>(threadIdx.x) % 128) {}

  /// Called early: starts to load what `finish` will read.
  __device__ void begin(const GroupedTile& tile) {
    if constexpr (Op == Grouped::down_backward) {
      if (thread_ != 0 || tile.rows <= 64 * group_) return;
      hopper::wait_stores_read<0>();
      load_saved(tile, 0);
      load_saved(tile, 1);
      for (int chunk = 2; chunk < 4; ++chunk) {
        for (const CUtensorMap& map : args_.saved) {
          hopper::prefetch(map, tile.column + 64 * chunk, tile.row + 64 * group_);
        }
      }
    }
  }

  __device__ void finish(const GroupedTile& tile, const float (&sums)[128]) {
    if (tile.rows <= 64 * group_) return;
    if constexpr (Op == Grouped::weight_gradient) {
      args_.is_narrow ? store_narrow_matrix(tile, sums) : store_matrix(tile, sums);
    } else if constexpr (Op == Grouped::down_backward) {
      store_gradients(tile, sums);
    } else {
      store_rows(tile, sums);
    }
  }

  /// Before the CTA ends: shared memory is no longer read.
  __device__ void end() {
    if (thread_ == 0) hopper::wait_stores_read<0>();
  }

 private:
  __device__ void sync() { hopper::named_sync(1 + group_, 128); }

  /// The next box to fill, of two: its last store has read it.
  __device__ unsigned char* free_box() {
    if (thread_ == 0) hopper::wait_stores_read<1>();
    sync();
    next_ ^= 1;
    return shared_.staged[group_][next_];
  }

  /// Where this lane's row of four 8 x 8 matrices lies: 16 rows of this warp, columns 16 * quarter to + 15.
  __device__ unsigned char* matrices(unsigned char* box, int quarter) {
    const int lane = thread_ % 32, row = thread_ / 32 * 16 + lane % 16, piece = 2 * quarter + lane / 16;
    return box + row * 128 + (piece ^ (row % 8)) * 16;
  }
  /// The pairs of those matrices among the sums of 64 columns.
  static __device__ void pairs_of(const float* sums, int quarter, std::uint32_t (&pairs)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      pairs[i] = hopper::pack<bfloat16>(sums[8 * quarter + 2 * i], sums[8 * quarter + 2 * i + 1]);
  }

  /// After boxes were filled, before they are stored.
  __device__ void publish() {
    hopper::fence_async_proxy();
    sync();
  }

  /// Stores a box of bf16 to columns from `column` on, without touching rows of the next expert.
  __device__ void store_box(const unsigned char* box, int result, const GroupedTile& tile, int column) {
    const int row = tile.row + 64 * group_, rows = tile.rows - 64 * group_;
    if (rows >= 64) {
      if (thread_ == 0) hopper::store(args_.out[result], box, column, row);
    } else {
#pragma unroll 1
      for (int piece = thread_; piece < rows * 8; piece += 128) {
        const int r = piece / 8, c = piece % 8;
        if (column + c * 8 >= args_.columns) continue;
        const uint4 values = *reinterpret_cast<const uint4*>(box + r * 128 + (c ^ (r % 8)) * 16);
        bfloat16* to = args_.results[result] + static_cast<std::int64_t>(row + r) * args_.columns + column + c * 8;
        *reinterpret_cast<uint4*>(to) = values;
      }
      sync();
    }
    if (thread_ == 0) hopper::commit_stores();  // an empty group counts as well
  }

  __device__ void store_rows(const GroupedTile& tile, const float (&sums)[128]) {
    constexpr int results = Op == Grouped::gate_up ? 3 : 1;
#pragma unroll
    for (int chunk = 0; chunk < GroupedTraits<Op>::width / 64; ++chunk) {
      const int column = tile.column + 64 * chunk;
      if (column >= args_.columns) break;
      const float *first = sums + 32 * chunk, *second = sums + 64 + 32 * chunk;
#pragma unroll
      for (int result = 0; result < results; ++result) {
        unsigned char* box = free_box();
#pragma unroll
        for (int quarter = 0; quarter < 4; ++quarter) {
          std::uint32_t pairs[4];
          pairs_of(result == 1 ? second : first, quarter, pairs);
          if (result == 2) {
            std::uint32_t up[4];
            pairs_of(second, quarter, up);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const float2 g = floats_of(pairs[i]), u = floats_of(up[i]);
              pairs[i] = hopper::pack<bfloat16>(g.x * fast_sigmoid(g.x) * u.x, g.y * fast_sigmoid(g.y) * u.y);
            }
          }
          hopper::store_matrices(matrices(box, quarter), pairs);
        }
        publish();
        store_box(box, result, tile, column);
      }
    }
  }

  /// Boxes 0 to 3 hold gate and up of even and odd chunks, and then their gradients; box 4 the activation.
  __device__ void load_saved(const GroupedTile& tile, int chunk) {
    if (tile.column + 64 * chunk >= args_.columns) return;
    hopper::Barrier& full = shared_.saved_full[group_][chunk % 2];
    full.arrive_expecting(2 * box_bytes);
    for (int i = 0; i < 2; ++i) {
      hopper::load(shared_.staged[group_][chunk % 2 * 2 + i], args_.saved[i], full, tile.column + 64 * chunk,
                   tile.row + 64 * group_);
    }
  }

  __device__ void store_gradients(const GroupedTile& tile, const float (&sums)[128]) {
#pragma unroll
    for (int chunk = 0; chunk < 4; ++chunk) {
      const int column = tile.column + 64 * chunk, half = chunk % 2;
      if (column >= args_.columns) break;
      unsigned char *gate_box = shared_.staged[group_][half * 2], *up_box = shared_.staged[group_][half * 2 + 1];
      unsigned char* act_box = shared_.staged[group_][4];
      if (chunk > 0) {
        if (thread_ == 0) {
          hopper::wait_stores_read<0>();
          if (chunk < 3) load_saved(tile, chunk + 1);
        }
        sync();
      }
      shared_.saved_full[group_][half].wait(saved_parity_ >> half & 1);
      saved_parity_ ^= 1u << half;
#pragma unroll
      for (int quarter = 0; quarter < 4; ++quarter) {
        std::uint32_t gate[4], up[4], act[4];
        hopper::load_matrices(gate, matrices(gate_box, quarter));
        hopper::load_matrices(up, matrices(up_box, quarter));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 g = floats_of(gate[i]), u = floats_of(up[i]);
          const float* d = sums + 32 * chunk + 8 * quarter + 2 * i;
          const float2 sig = {fast_sigmoid(g.x), fast_sigmoid(g.y)};
          const float2 silu = {g.x * sig.x, g.y * sig.y};
          act[i] = hopper::pack<bfloat16>(silu.x * u.x, silu.y * u.y);
          up[i] = hopper::pack<bfloat16>(d[0] * silu.x, d[1] * silu.y);
          gate[i] = hopper::pack<bfloat16>(d[0] * u.x * (sig.x + silu.x * (1 - sig.x)),
                                           d[1] * u.y * (sig.y + silu.y * (1 - sig.y)));
        }
        hopper::store_matrices(matrices(gate_box, quarter), gate);
        hopper::store_matrices(matrices(up_box, quarter), up);
        hopper::store_matrices(matrices(act_box, quarter), act);
      }
      publish();
      store_box(gate_box, 0, tile, column);
      store_box(up_box, 1, tile, column);
      store_box(act_box, 2, tile, column);
    }
  }

  /// fp32, by the copy engine alone, which clips at the edges of the matrix and adds where sums accumulate.
  __device__ void store_matrix(const GroupedTile& tile, const float (&sums)[128]) {
    const int lane = thread_ % 32, row = thread_ / 32 * 16 + lane / 4;
    const int odd = row % 2;  // odd rows write their columns in another order, so that a warp spreads over all banks
#pragma unroll
    for (int chunk = 0; chunk < 8; ++chunk) {
      const int column = tile.column + 32 * chunk;
      if (column >= args_.columns) break;
      unsigned char* box = free_box();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float* near = sums + 16 * chunk + 4 * j + 2 * half;
          const float2 even_first = {near[0], near[1]}, odd_first = {near[8], near[9]};
          const auto write = [&](int eight, float2 value) {
            const int piece = 2 * eight + lane % 4 / 2;
            *reinterpret_cast<float2*>(box + (row + 8 * half) * 128 + (piece ^ (row % 8)) * 16 + lane % 2 * 8) = value;
          };
          write(j + 2 * odd, odd ? odd_first : even_first);
          write(j + 2 * (1 - odd), odd ? even_first : odd_first);
        }
      }
      publish();
      store_matrix_box(box, tile, column);
    }
  }
  /// The same in bf16.
  __device__ void store_narrow_matrix(const GroupedTile& tile, const float (&sums)[128]) {
#pragma unroll
    for (int chunk = 0; chunk < 4; ++chunk) {
      const int column = tile.column + 64 * chunk;
      if (column >= args_.columns) break;
      unsigned char* box = free_box();
#pragma unroll
      for (int quarter = 0; quarter < 4; ++quarter) {
        std::uint32_t pairs[4];
        pairs_of(sums + 32 * chunk, quarter, pairs);
        hopper::store_matrices(matrices(box, quarter), pairs);
      }
      publish();
      store_matrix_box(box, tile, column);
    }
  }
  __device__ void store_matrix_box(const unsigned char* box, const GroupedTile& tile, int column) {
    if (thread_ != 0) return;
    if (args_.accumulate) {
      hopper::add(args_.out[0], box, column, tile.row + 64 * group_, tile.expert);
    } else {
      hopper::store(args_.out[0], box, column, tile.row + 64 * group_, tile.expert);
    }
    hopper::commit_stores();
  }

  const GroupedArguments& args_;
  GroupedShared<Op>& shared_;
  int group_, thread_, next_ = 0;
  std::uint32_t saved_parity_ = 0;
};

}  // namespace pleat::inline v0::moe::detail
