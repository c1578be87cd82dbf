// Who sees, and may decide, which experts tokens take: how a reference follows a mesh's choice at ties.
#pragma once

#include <algorithm>
#include <cstdint>

#include <pleat/comm.hpp>
#include <pleat/core/carve.hpp>
#include <pleat/tensor/tensor_ref.hpp>

#include "data.hpp"
#include "options.hpp"

namespace train_moe {

/// All arrays are on the host.
class RoutingWatch {
 public:
  virtual ~RoutingWatch() = default;
  /// Whether it decides.
  virtual bool decides() const { return false; }
  /// The experts [tokens, top_k] that the tokens shall take. `logits` [tokens, experts] are of the model's accumulator.
  virtual const std::int32_t* decide(int /*layer*/, const MicroBatch&, const pleat::TensorRef& /*logits*/) {
    return nullptr;
  }
  /// The experts [tokens, top_k] that they took.
  virtual void observe(int layer, const MicroBatch& batch, const std::int32_t* ids) = 0;
};

/// Carries logits and ids between the device and a watch; waits for the device each time. Without a watch it does
/// nothing.
template <class Backend, class A>
class WatchedRouting {
 public:
  using Comm = typename Backend::Comm;
  using Stream = typename Backend::Stream;

  WatchedRouting() = default;
  /// `memory_for(footprint)` gives memory of the caller's, for `tokens` tokens of a call at most.
  template <class MemoryFor>
  WatchedRouting(RoutingWatch* watch, const ModelShape& model, std::int64_t tokens, const pleat::GroupComm<Comm>& world,
                 MemoryFor memory_for)
      : watch_(watch), experts_(model.experts), top_k_(model.top_k), world_(world) {
    if (watch == nullptr) return;
    const auto logits_elems = static_cast<std::size_t>(tokens * experts_),
               ids_elems = static_cast<std::size_t>(tokens * top_k_);
    pleat::Carver pinned_size, size;
    pinned_size.take<A>(logits_elems);
    pinned_size.take<std::int32_t>(ids_elems);
    size.take<std::int32_t>(ids_elems);
    const auto memory =
        memory_for(pleat::Footprint{.persistent = size.used_bytes(), .pinned_host = pinned_size.used_bytes()});
    pleat::Carver pinned(memory.pinned_host), persistent(memory.persistent);
    logits_ = pinned.take<A>(logits_elems);
    ids_ = pinned.take<std::int32_t>(ids_elems);
    decided_ = persistent.take<std::int32_t>(ids_elems);
  }

  /// What the watch decides of logits [rows, experts], in device memory; null where it does not.
  std::int32_t* decided(int layer, const MicroBatch& batch, const A* logits, Stream s) {
    if (watch_ == nullptr || !watch_->decides()) return nullptr;
    const std::int64_t rows = batch.rows();
    executor_.copy(logits_, logits, static_cast<std::size_t>(rows * experts_) * sizeof(A), s);
    world_.wait(s);
    const std::int32_t* const ids = watch_->decide(layer, batch, pleat::TensorRef{logits_, {rows, experts_}});
    std::copy_n(ids, rows * top_k_, ids_);
    executor_.copy(decided_, ids_, static_cast<std::size_t>(rows * top_k_) * sizeof(std::int32_t), s);
    return decided_;
  }
  /// Shows the watch ids [rows, top_k].
  void observe(int layer, const MicroBatch& batch, const void* ids, Stream s) {
    if (watch_ == nullptr) return;
    executor_.copy(ids_, ids, static_cast<std::size_t>(batch.rows() * top_k_) * sizeof(std::int32_t), s);
    world_.wait(s);
    watch_->observe(layer, batch, ids_);
  }

 private:
  RoutingWatch* watch_ = nullptr;
  std::int64_t experts_ = 0, top_k_ = 0;
  pleat::GroupComm<Comm> world_;
  typename Backend::Executor executor_;
  A* logits_ = nullptr;                               // pinned
  std::int32_t *ids_ = nullptr, *decided_ = nullptr;  // pinned, and in device memory
};

}  // namespace train_moe
