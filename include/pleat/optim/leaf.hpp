// What optimizers compute on a device: the primary template of their leaves, and the values of a step that stay there.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include <pleat/core/config.hpp>
#include <pleat/core/executor.hpp>
#include <pleat/fsdp/shard_memory.hpp>

namespace pleat::inline v0::optim {

/// What one rank adds to a step besides gradients: sums over the rank's own target tokens, so that each token of the
/// global batch is in the sum of exactly one rank.
struct StepSums {
  double loss = 0;
  /// Losses that are means already, such as a load balance: summed over ranks and not divided.
  double aux_loss = 0;
  double tokens = 0;
  /// 0, or what failed on this rank besides the operations whose status words StepNorm reads.
  double status = 0;
};

/// What every rank knows after the step's one reduction, in device memory; the same bits on every rank.
struct StepResult {
  /// Euclidean norm of the mean gradient of the global batch, before clipping; each parameter counts once.
  double norm = 0;
  /// What gradient sums are multiplied with: clip coefficient / tokens.
  double grad_scale = 0;
  /// Mean loss over the global batch.
  double loss = 0;
  double aux_loss = 0;
  double tokens = 0;
  /// 0, or the largest other status of any rank, or `bad_rate`.
  double status = 0;
  /// Steps applied so far, this one included when it is.
  std::int64_t steps = 0;
  /// Steps left out so far.
  std::int64_t skipped = 0;
  /// 1 when the step is applied. 0 when the norm is not finite, the number of tokens is none that can be, an operation
  /// failed or a learning rate in device memory cannot be: parameters stay as they are.
  std::int64_t applied = 0;
};
/// The status of a step whose learning rate in device memory is negative or not finite.
inline constexpr double bad_rate = -0x1p40;

/// One rank's terms of StepResult.
struct StepPartial {
  double sum_of_squares = 0;
  StepSums sums;
};

/// Whether a step can have this learning rate.
PLEAT_HD inline bool is_rate(double lr) {
  return std::isfinite(lr) && lr >= 0;
}

/// A learning rate: a value, which a captured graph keeps; or one in device memory, which is read when the step runs
/// there, so that whoever writes it between launches changes it. Finite, and 0 or more: a step with another one in
/// device memory is not applied, and its status is `bad_rate`.
class LearningRate {
 public:
  /// Errors: shape_error F16 for a value that cannot be.
  LearningRate(double value) : value_(value) {
    if (!is_rate(value)) {
      fail<shape_error>("pleat[F16]: a learning rate of ", value, "; it is finite, and 0 or more");
    }
  }
  template <class Pointer>
  requires std::is_pointer_v<Pointer> && std::is_convertible_v<Pointer, const double*>
  constexpr LearningRate(Pointer in_device_memory) : where_(in_device_memory) {}

  /// Whether the rate is read from device memory.
  bool is_in_memory() const { return where_ != nullptr; }
  /// For leaves, on the device.
  PLEAT_HD double read() const { return where_ == nullptr ? value_ : *where_; }

 private:
  double value_ = 0;
  const double* where_ = nullptr;
};

/// How many terms a rank's sum of squares is added up from, on every device: what sums gradients last may add their
/// squares at once.
inline constexpr int square_partials = 512;

/// Hyperparameters of AdamW. source: Loshchilov and Hutter, Decoupled Weight Decay Regularization.
struct AdamwOptions {
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;
};

}  // namespace pleat::inline v0::optim

namespace pleat::inline v0 {

/// Leaves of the optimizers; specialized per device. Static members, ordered on the stream:
/// - `add_squares(double* partials, const fsdp::ShardMemory& shard, s)`: adds norm_weight * g^2 of the shard's pieces
/// to
///   partials[optim::square_partials], each element to one of them, in float64 and a fixed order.
/// - `finish_partial(StepPartial* partial, const double* squares, const std::int64_t* const* statuses, int
/// status_words,
///   s)`: partial->sum_of_squares = the squares' sum, in a fixed order; its status is the largest of its own and the
///   words that statuses[status_words] point to.
/// - `finish_step(StepResult* result, const StepPartial* partials, int ranks, double max_norm, s)`: adds
///   partials[ranks] in rank order; of statuses any but 0 counts. With t tokens, norm = sqrt(sum of squares) / t and
///   grad_scale = min(1, max_norm / (norm + 1e-6)) / t, without the first factor when max_norm is 0; counts the step as
///   applied or skipped.
/// - `check_rates(StepResult* result, LearningRate first, LearningRate second, s)`: a step that is applied and has one
/// that
///   `is_rate` denies becomes one that is skipped, with the status bad_rate.
/// - `adamw(const fsdp::ShardMemory& shard, void* m, void* v, const AdamwOptions& options, LearningRate lr, const
///   StepResult* result, s)`: one step on the shard's pieces of AdamW, none when the step is skipped. m, v
///   [max_state_elems] of master_dtype.
template <class DeviceType>
struct optim_leaf {
  static_assert(detail::no_device<DeviceType>,
                "pleat[T03]: no optimizer leaves for this device: include pleat/optim/host/leaf.hpp or "
                "pleat/optim/cuda/leaf.cuh");
};

}  // namespace pleat::inline v0
