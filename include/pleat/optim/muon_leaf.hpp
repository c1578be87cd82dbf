// What Muon computes on a device: its options, the pieces it updates, and the primary template of Newton-Schulz.
#pragma once

#include <cstdint>
#include <span>

#include <pleat/core/carve.hpp>
#include <pleat/core/dtype.hpp>
#include <pleat/optim/leaf.hpp>

namespace pleat::inline v0::optim {

/// The two published forms: how the momentum is kept, and what the orthogonal update is scaled with.
enum class MuonForm : unsigned char {
  /// m += (1 - mu) (g - m), u = g + mu (m - g); scale sqrt(max(1, rows / cols)). source: KellerJordan/Muon.
  keller,
  /// m = mu m + g, u = g + mu m; scale 0.2 sqrt(max(rows, cols)). source: MoonshotAI/Moonlight.
  moonlight,
};

/// Hyperparameters of Muon. source: Jordan et al., Muon: an optimizer for hidden layers in neural networks.
struct MuonOptions {
  MuonForm form = MuonForm::keller;
  double momentum = 0.95;
  /// Whether the update looks a step of the momentum ahead; otherwise it is the momentum itself.
  bool nesterov = true;
  double weight_decay = 0.1;
  int iterations = 5;
  /// Added to the Frobenius norm that matrices are divided by.
  double eps = 1e-7;
  /// What matrices are exchanged, stored and multiplied in; products are summed in its accumulator.
  DType product = DType::bf16;
  /// Up to how many elements per rank are exchanged and orthogonalized at one time; bounds the scratch.
  std::int64_t round_elems = std::int64_t{1} << 26;
};

/// Newton-Schulz iteration X <- a X + (b A + c A^2) X with A = X X^T. source: as MuonOptions.
struct NewtonSchulz {
  static constexpr double a = 3.4445, b = -4.7750, c = 2.0315;
};

/// A part of a matrix that this rank holds, as device code reads it. Pieces of a round lie side by side in one range of
/// work, each at the place within 8 elements that it has in its shard.
struct MuonPiece {
  std::int64_t begin;
  std::int64_t elems;
  void* master;          // [elems] of the master's dtype
  const void* gradient;  // [elems] of the master's dtype
  void* momentum;        // [elems] of the master's dtype
  void* compute;         // [elems] of the compute dtype, or null
  void* exchanged;       // [elems] of the product's dtype: to Newton-Schulz, and its result
  double scale;          // of the matrix's orthogonal update
  bool weight_decay;
};

/// The dtypes of a round's pieces.
struct MuonTypes {
  DType master;
  DType compute;
  DType product;
};

/// The dtypes matrices can be multiplied in.
using ProductTypes = TypeList<double, float, bfloat16>;

/// Matrices of one shape, row-major, `stride_elems` apart.
struct MatrixBatch {
  void* data;
  std::int64_t rows, cols, count;

  /// Elements up to the next multiple of 128; from one matrix to the next.
  static constexpr std::int64_t padded(std::int64_t elems) { return (elems + 127) / 128 * 128; }
  constexpr std::int64_t stride_elems() const { return padded(rows * cols); }
  /// The order of A: the smaller extent, since X X^T and X^T X serve alike.
  constexpr std::int64_t order() const { return rows < cols ? rows : cols; }
  constexpr std::int64_t gram_stride_elems() const { return padded(order() * order()); }

  /// Workspace of the iteration.
  struct Work {
    std::byte* other;  // as data
    std::byte* gram;   // [count, order, order]
    std::byte* poly;   // [count, order, order]
    double* squares;   // [count, square_parts]
    static constexpr int square_parts = 64;
  };
  Work carve(Carver& memory, DType product) const {
    const auto bytes = [&](std::int64_t elems) {
      return static_cast<std::size_t>(count * elems) * size_bytes(product);
    };
    Work work{};
    work.other = memory.take_bytes(bytes(stride_elems()));
    work.gram = memory.take_bytes(bytes(gram_stride_elems()));
    work.poly = memory.take_bytes(bytes(gram_stride_elems()));
    work.squares = memory.take<double>(static_cast<std::size_t>(count) * Work::square_parts);
    return work;
  }
};

}  // namespace pleat::inline v0::optim

namespace pleat::inline v0 {

/// Muon's element-wise leaves; specialized per device. Static members, ordered on the stream; none of them writes when
/// the step is skipped:
/// - `momentum(std::span<const MuonPiece> pieces, std::int64_t work_elems, MuonTypes, const MuonOptions&, const
///   StepResult* result, s)`: updates the momentum with the scaled gradient, and writes what is orthogonalized.
/// - `update(pieces, work_elems, MuonTypes, const MuonOptions&, LearningRate lr, const StepResult* result, s)`: master
///   <- master (1 - lr weight_decay) - lr scale exchanged, and its compute copy. `pieces` is device memory.
template <class DeviceType>
struct muon_leaf {
  static_assert(detail::no_device<DeviceType>,
                "pleat[T03]: no leaves of Muon for this device: include pleat/optim/host/muon_leaf.hpp or "
                "pleat/optim/cuda/muon_leaf.cuh");
};

/// Newton-Schulz on batches of matrices, in place; bound once, since libraries of products choose algorithms then:
/// - `newton_schulz_leaf(std::span<const MatrixBatch> batches, const MuonOptions&, Block work, s)`: `work` is shared by
/// the
///   batches, each alone at a time.
/// - `run(std::size_t batch, s)`: each matrix is divided by its norm + eps and iterated. The bits of a result depend on
///   its matrix and shape only, not on what else is in the batch.
template <class DeviceType>
class newton_schulz_leaf {
  static_assert(detail::no_device<DeviceType>,
                "pleat[T03]: no Newton-Schulz for this device: include pleat/optim/host/newton_schulz.hpp or "
                "pleat/optim/cuda/newton_schulz.cuh");
};

}  // namespace pleat::inline v0
