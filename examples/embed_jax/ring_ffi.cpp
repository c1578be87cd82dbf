// Ring attention as foreign functions of XLA: the devices of a shard_map are the ranks of the ring.
#include <cstdint>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>

#include <pleat/attention.hpp>
#include <pleat/comm.hpp>

#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;
using Tensor = ffi::BufferR4<ffi::F32>;
using Output = ffi::ResultBufferR4<ffi::F32>;
using Bytes = ffi::BufferR1<ffi::U8>;

/// One attention of one rank: bound at its first call, kept for the next ones.
struct Operation {
  Operation(const pleat::ring::Plan& plan, pleat::ThreadComm& comm)
      : scratch(plan.footprint().scratch),
        persistent(plan.footprint().persistent),
        pinned(plan.footprint().pinned_host),
        ring(pleat::ring::bind(plan, pleat::HostExecutor{}, pleat::GroupComm<pleat::ThreadComm>(comm),
                               pleat::Memory<pleat::HostArena>{scratch.block(), persistent.block(), pinned.block()})) {}

  pleat::HostBuffer scratch, persistent, pinned;
  pleat::ring::RingAttention<pleat::HostExecutor, pleat::ThreadComm, pleat::HostArena> ring;
};

using Key = std::tuple<std::int64_t, std::int64_t, int, int, int, int, bool>;
struct Rank {
  explicit Rank(pleat::ThreadComm of_rank) : comm(std::move(of_rank)) {}

  pleat::ThreadComm comm;
  std::map<Key, Operation> operations;
};

pleat::TensorRef view(float* data, const ffi::AnyBuffer::Dimensions& dims) {
  return pleat::TensorRef(data, {dims[0], dims[1], dims[2], dims[3]});
}
pleat::TensorRef view(const Tensor& t) {
  return view(t.typed_data(), t.dimensions());
}

pleat::ring::Plan plan_of(int cp, std::int64_t batch, std::int64_t local_tokens, int q_heads, int kv_heads, int qk_dim,
                          int v_dim, bool causal) {
  return pleat::ring::plan(cp,
                           {.batch = batch,
                            .tokens = local_tokens * cp,
                            .q_heads = q_heads,
                            .kv_heads = kv_heads,
                            .qk_dim = qk_dim,
                            .v_dim = v_dim},
                           {.causal = causal});
}

}  // namespace

/// The ranks, made by Python and named by address in each call.
struct World {
  explicit World(int cp) : ranks(cp) {
    for (int r = 0; r < cp; ++r) of_rank.emplace_back(ranks.comm(r));
  }
  Operation& operation(int rank, const Tensor& q, const Tensor& k, const Tensor& v, bool causal) {
    const auto dims = [](const Tensor& t, std::size_t axis) { return static_cast<int>(t.dimensions()[axis]); };
    const Key key{q.dimensions()[0], q.dimensions()[1], dims(q, 2), dims(k, 2), dims(q, 3), dims(v, 3), causal};
    Rank& mine = of_rank.at(static_cast<std::size_t>(rank));
    const auto found = mine.operations.find(key);
    if (found != mine.operations.end()) return found->second;
    const auto plan = std::apply([&](auto... part) { return plan_of(ranks.size(), part...); }, key);
    return mine.operations.try_emplace(key, plan, mine.comm).first->second;
  }

  pleat::ThreadRanks<> ranks;
  std::deque<Rank> of_rank;
};

namespace {

/// What a rank throws is XLA's error, and ends the waits of the others.
template <class F>
ffi::Error guarded(std::int64_t world, int rank, F&& f) {
  auto* const ranks = reinterpret_cast<World*>(world);
  try {
    f(*ranks);
    return ffi::Error::Success();
  } catch (const std::exception& e) {
    ranks->ranks.fail(rank, e.what());
    return ffi::Error(ffi::ErrorCode::kInternal, e.what());
  }
}

ffi::Error forward(ffi::BufferR0<ffi::S32> rank, Tensor q, Tensor k, Tensor v, Output out, ffi::Result<Bytes> kept,
                   std::int64_t world, bool causal) {
  return guarded(world, *rank.typed_data(), [&](World& ranks) {
    Operation& op = ranks.operation(*rank.typed_data(), q, k, v, causal);
    pleat::HostBuffer memory(op.ring.plan().footprint().saved);
    pleat::ring::Saved saved(memory.block());
    op.ring.forward({}, view(q), view(k), view(v), view(*out), saved);
    std::memcpy(kept->typed_data(), memory.data(), memory.size_bytes());
  });
}

ffi::Error backward(ffi::BufferR0<ffi::S32> rank, Tensor q, Tensor k, Tensor v, Tensor out, Bytes kept, Tensor dout,
                    Output dq, Output dk, Output dv, std::int64_t world, bool causal) {
  return guarded(world, *rank.typed_data(), [&](World& ranks) {
    Operation& op = ranks.operation(*rank.typed_data(), q, k, v, causal);
    pleat::HostBuffer memory(op.ring.plan().footprint().saved);
    std::memcpy(memory.data(), kept.typed_data(), memory.size_bytes());
    const auto saved = op.ring.restore(memory.block(), view(q), view(k), view(v), view(out));
    op.ring.backward({}, view(dout), saved, view(*dq), view(*dk), view(*dv));
  });
}

}  // namespace

// The library's own calls, for ctypes.
extern "C" void* pleat_world_new(int cp) {
  return new World(cp);
}
extern "C" void pleat_world_delete(void* world) {
  delete static_cast<World*>(world);
}
/// Bytes that forward keeps for backward, and the places of a rank's tokens in the sequence, written to `positions`.
extern "C" std::int64_t pleat_ring_plan(int cp, int rank, std::int64_t batch, std::int64_t local_tokens, int q_heads,
                                        int kv_heads, int qk_dim, int v_dim, int causal, std::int64_t* positions) {
  const auto plan = plan_of(cp, batch, local_tokens, q_heads, kv_heads, qk_dim, v_dim, causal != 0);
  for (std::int64_t i = 0; i < local_tokens; ++i) positions[i] = plan.spans[static_cast<std::size_t>(rank)].position(i);
  return static_cast<std::int64_t>(plan.footprint().saved);
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(PleatRingForward, forward,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::BufferR0<ffi::S32>>()
                                  .Arg<Tensor>()
                                  .Arg<Tensor>()
                                  .Arg<Tensor>()
                                  .Ret<Tensor>()
                                  .Ret<Bytes>()
                                  .Attr<std::int64_t>("world")
                                  .Attr<bool>("causal"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(PleatRingBackward, backward,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::BufferR0<ffi::S32>>()
                                  .Arg<Tensor>()
                                  .Arg<Tensor>()
                                  .Arg<Tensor>()
                                  .Arg<Tensor>()
                                  .Arg<Bytes>()
                                  .Arg<Tensor>()
                                  .Ret<Tensor>()
                                  .Ret<Tensor>()
                                  .Ret<Tensor>()
                                  .Attr<std::int64_t>("world")
                                  .Attr<bool>("causal"));
