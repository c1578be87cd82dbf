// The leaves of optim_leaf on the host.
#pragma once

#include <numeric>
#include <span>

#include <pleat/core/host/leaf.hpp>
#include <pleat/optim/update_rules.hpp>

namespace pleat::inline v0 {

template <>
struct optim_leaf<host_device> {
  static void add_squares(double* partials, const fsdp::ShardMemory& shard, HostStream s) {
    for (const fsdp::UpdatePiece& piece : pieces_of(shard)) {
      const auto begin = static_cast<std::size_t>(piece.begin) * size_bytes(shard.master_dtype);
      const auto* gradient = static_cast<const std::byte*>(shard.gradient) + begin;
      double squares = 0;
      core_leaf<host_device>::sum_of_squares(&squares, gradient, shard.master_dtype,
                                             static_cast<std::size_t>(piece.elems), false, nullptr, s);
      *partials += piece.norm_weight * squares;
    }
  }

  static void finish_partial(optim::StepPartial* partial, const double* squares, const std::int64_t* const* statuses,
                             int status_words, HostStream) {
    partial->sum_of_squares = std::accumulate(squares, squares + optim::square_partials, 0.0);
    for (int i = 0; i < status_words; ++i) optim::add_status(*partial, *statuses[i]);
  }

  static void finish_step(optim::StepResult* result, const optim::StepPartial* partials, int ranks, double max_norm,
                          HostStream) {
    optim::StepPartial total;
    for (int r = 0; r < ranks; ++r) optim::add_partial(total, partials[r]);
    optim::finish_step(*result, total, max_norm);
  }

  static void check_rates(optim::StepResult* result, optim::LearningRate first, optim::LearningRate second,
                          HostStream) {
    for (const optim::LearningRate lr : {first, second}) optim::check_rate(*result, lr.read());
  }

  static void adamw(const fsdp::ShardMemory& shard, void* m, void* v, const optim::AdamwOptions& options,
                    optim::LearningRate lr, const optim::StepResult* result, HostStream) {
    if (!result->applied) return;
    dispatch_dtype(AccumulatorTypes{}, shard.master_dtype, [&](auto master_type) {
      using T = typename decltype(master_type)::type;
      const optim::AdamwRule<T> rule(options, lr.read(), *result);
      auto* const p = static_cast<T*>(shard.master);
      const auto* const gradient = static_cast<const T*>(shard.gradient);
      for (const fsdp::UpdatePiece& piece : pieces_of(shard)) {
        if (piece.optimizer != fsdp::Optimizer::adamw) continue;
        auto* const first = static_cast<T*>(m) + piece.state_begin;
        auto* const second = static_cast<T*>(v) + piece.state_begin;
        for (std::int64_t i = 0; i < piece.elems; ++i) {
          const std::int64_t at = piece.begin + i;
          rule.apply(p[at], first[i], second[i], gradient[at], piece.weight_decay);
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
