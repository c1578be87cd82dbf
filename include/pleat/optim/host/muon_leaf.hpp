// The element-wise leaves of Muon on the host.
#pragma once

#include <pleat/core/host/executor.hpp>
#include <pleat/optim/host/leaf.hpp>  // a step checks its rates

namespace pleat::inline v0 {

template <>
struct muon_leaf<host_device> {
  static void momentum(std::span<const optim::MuonPiece> pieces, std::int64_t, optim::MuonTypes types,
                       const optim::MuonOptions& options, const optim::StepResult* result, HostStream) {
    if (!result->applied) return;
    dispatch_dtype(AccumulatorTypes{}, types.master, [&](auto master) {
      dispatch_dtype(optim::ProductTypes{}, types.product, [&](auto product) {
        using T = typename decltype(master)::type;
        using P = typename decltype(product)::type;
        const optim::MuonRule<T> rule(options, *result);
        for (const optim::MuonPiece& piece : pieces) {
          auto* const momentum = static_cast<T*>(piece.momentum);
          const auto* const gradient = static_cast<const T*>(piece.gradient);
          auto* const out = static_cast<P*>(piece.exchanged);
          for (std::int64_t i = 0; i < piece.elems; ++i) out[i] = static_cast<P>(rule.apply(momentum[i], gradient[i]));
        }
      });
    });
  }

  static void update(std::span<const optim::MuonPiece> pieces, std::int64_t, optim::MuonTypes types,
                     const optim::MuonOptions& options, optim::LearningRate lr, const optim::StepResult* result,
                     HostStream) {
    if (!result->applied) return;
    dispatch_dtype(AccumulatorTypes{}, types.master, [&](auto master) {
      dispatch_dtype(FloatTypes{}, types.compute, [&](auto compute) {
        dispatch_dtype(optim::ProductTypes{}, types.product, [&](auto product) {
          using T = typename decltype(master)::type;
          using Compute = typename decltype(compute)::type;
          using P = typename decltype(product)::type;
          for (const optim::MuonPiece& piece : pieces) {
            const optim::MuonUpdate<T> rule(piece, lr.read(), options.weight_decay);
            auto* const p = static_cast<T*>(piece.master);
            const auto* const direction = static_cast<const P*>(piece.exchanged);
            auto* const copy = static_cast<Compute*>(piece.compute);
            for (std::int64_t i = 0; i < piece.elems; ++i) {
              p[i] = rule.apply(p[i], static_cast<T>(direction[i]));
              if (copy != nullptr) copy[i] = static_cast<Compute>(p[i]);
            }
          }
        });
      });
    });
  }
};

}  // namespace pleat::inline v0
