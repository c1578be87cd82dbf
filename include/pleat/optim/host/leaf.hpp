// The leaves of optim_leaf on the host.
#pragma once

#include <algorithm>
#include <cmath>
#include <span>

#include <pleat/core/host/leaf.hpp>
#include <pleat/optim/leaf.hpp>

namespace pleat::inline v0 {

template <>
struct optim_leaf<host_device> {
  static void sum_of_squares(double* sum, const fsdp::ShardMemory& shard, HostStream s) {
    for (const fsdp::UpdatePiece& piece : pieces_of(shard)) {
      const auto begin = static_cast<std::size_t>(piece.begin) * size_bytes(shard.master_dtype);
      const auto* gradient = static_cast<const std::byte*>(shard.gradient) + begin;
      double squares = 0;
      core_leaf<host_device>::sum_of_squares(&squares, gradient, shard.master_dtype,
                                             static_cast<std::size_t>(piece.elems), false, nullptr, s);
      *sum += piece.norm_weight * squares;
    }
  }

  static void finish_step(optim::StepScale* step, const optim::StepPartial* partials, int ranks, double max_norm,
                          HostStream) {
    optim::StepPartial total;
    for (const optim::StepPartial& partial : std::span(partials, static_cast<std::size_t>(ranks))) {
      total.sum_of_squares += partial.sum_of_squares;
      total.sums.loss += partial.sums.loss;
      total.sums.tokens += partial.sums.tokens;
      total.sums.status = std::max(total.sums.status, partial.sums.status);
    }
    step->tokens = total.sums.tokens;
    step->status = total.sums.status;
    step->loss = total.sums.loss / step->tokens;
    step->norm = std::sqrt(total.sum_of_squares) / step->tokens;
    const double clip = max_norm > 0 ? std::min(1.0, max_norm / (step->norm + 1e-6)) : 1.0;
    step->scale = clip / step->tokens;
    step->finite = std::isfinite(step->norm);
    ++(step->finite ? step->step : step->skipped);
  }

  static void adamw(const fsdp::ShardMemory& shard, void* m, void* v, const optim::AdamwOptions& options, double lr,
                    const optim::StepScale* step, HostStream) {
    if (!step->finite) return;
    dispatch_dtype(AccumulatorTypes{}, shard.master_dtype, [&](auto master_type) {
      using T = typename decltype(master_type)::type;
      const auto unscale = static_cast<T>(step->scale);
      const auto beta1 = static_cast<T>(options.beta1);
      const auto beta2 = static_cast<T>(options.beta2);
      const auto t = static_cast<double>(step->step);
      const auto step_size = static_cast<T>(lr / (1 - std::pow(options.beta1, t)));
      const auto root_correction2 = static_cast<T>(std::sqrt(1 - std::pow(options.beta2, t)));
      auto* const p = static_cast<T*>(shard.master);
      const auto* const gradient = static_cast<const T*>(shard.gradient);
      auto* const first = static_cast<T*>(m);
      auto* const second = static_cast<T*>(v);
      for (const fsdp::UpdatePiece& piece : pieces_of(shard)) {
        const auto keep = static_cast<T>(piece.weight_decay ? 1 - lr * options.weight_decay : 1);
        for (std::int64_t i = piece.begin; i < piece.begin + piece.elems; ++i) {
          const T g = gradient[i] * unscale;
          first[i] = beta1 * first[i] + (1 - beta1) * g;
          second[i] = beta2 * second[i] + (1 - beta2) * g * g;
          const T denominator = std::sqrt(second[i]) / root_correction2 + static_cast<T>(options.eps);
          p[i] = p[i] * keep - step_size * (first[i] / denominator);
        }
        write_compute_copy(shard, p, piece);
      }
    });
  }

 private:
  static std::span<const fsdp::UpdatePiece> pieces_of(const fsdp::ShardMemory& shard) {
    return {shard.pieces, static_cast<std::size_t>(shard.piece_count)};
  }
  template <class T>
  static void write_compute_copy(const fsdp::ShardMemory& shard, const T* master, const fsdp::UpdatePiece& piece) {
    if (shard.compute == nullptr) return;
    auto* to = static_cast<std::byte*>(shard.compute) +
               static_cast<std::size_t>(piece.begin) * size_bytes(shard.compute_dtype);
    core_leaf<host_device>::cast_copy(to, shard.compute_dtype, master + piece.begin, shard.master_dtype,
                                      static_cast<std::size_t>(piece.elems), {});
  }
};

}  // namespace pleat::inline v0
