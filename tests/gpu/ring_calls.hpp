// Forward and backward of ring attention on this rank's part of a problem, on device memory that starts as NaN.
#pragma once

#include <array>
#include <optional>

#include <pleat/attention/ring.hpp>
#include <pleat/core/host/buffer.hpp>

#include <conformance/site.hpp>
#include <unit/attention/oracle.hpp>

namespace templates_testing {

using namespace pleat;

/// What no result may depend on, and the split, on which the bits do.
struct RingHow {
  int max_ctas = 0;
  std::optional<ring::Layout> layout{};
  /// The plan knows nothing of the packed documents: each forward is given them. Then the layout must be named, since a
  /// plan chooses one for the documents it knows.
  bool places = false;
  ring::Launches launches = ring::Launches::per_step;
};

inline ring::Plan ring_plan(const oracle::Problem& p, int cp, DType dtype, Transport transport, const RingHow& how) {
  return ring::plan(cp,
                    {.batch = p.batch,
                     .tokens = p.tokens,
                     .q_heads = p.q_heads,
                     .kv_heads = p.kv_heads,
                     .qk_dim = p.qk_dim,
                     .v_dim = p.v_dim,
                     .dtype = dtype,
                     .cu_seqlens = how.places ? std::vector<std::int64_t>{0, p.tokens} : p.cu_seqlens},
                    {.causal = p.causal,
                     .transport = transport,
                     .layout = how.layout,
                     .launches = how.launches,
                     .max_ctas = how.max_ctas});
}
inline oracle::Outputs poisoned_outputs(const oracle::Problem& p, const oracle::Inputs& in) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  return {std::vector<double>(in.dout.size(), nan), std::vector<double>(p.rows(p.q_heads), nan),
          std::vector<double>(in.q.size(), nan), std::vector<double>(in.k.size(), nan),
          std::vector<double>(in.v.size(), nan)};
}

/// One rank's rows of T, in host and device memory.
template <class Buffer, class T>
class RankRows {
 public:
  RankRows(std::int64_t rows, std::int64_t pitch)
      : pitch_(pitch),
        host_(static_cast<std::size_t>(rows * pitch)),
        device_(std::max<std::size_t>(1, host_.size() * sizeof(T))) {
    std::memset(static_cast<void*>(host_.data()), 0xff, host_.size() * sizeof(T));
  }
  /// [batch, tokens, heads, dim]: elements `first` and on of each row.
  TensorRef view(std::int64_t batch, std::int64_t tokens, int first, int heads, int dim, DeviceKind device) const {
    TensorRef t(reinterpret_cast<T*>(device_.block().data) + first, dtype_of<T>, {}, {device, 0});
    t.push_extent(batch, tokens * pitch_);
    t.push_extent(tokens, pitch_);
    t.push_extent(heads, dim);
    t.push_extent(dim, 1);
    return t;
  }
  /// The element of the host's copy that `element` is in a view.
  T& host(const T* element) {
    return host_[static_cast<std::size_t>(element - reinterpret_cast<T*>(device_.block().data))];
  }
  void upload() {
    if (!host_.empty()) device_.upload(reinterpret_cast<const std::byte*>(host_.data()));
  }
  void download() {
    if (!host_.empty()) device_.download(reinterpret_cast<std::byte*>(host_.data()));
  }
  std::byte* data() const { return device_.block().data; }
  std::size_t bytes() const { return host_.size() * sizeof(T); }

 private:
  std::int64_t pitch_;
  std::vector<T> host_;
  Buffer device_;
};

/// What a rank binds a ring to: memory that starts as NaN, its part of the arena too.
template <class Backend>
class RingMemory {
 public:
  using Arena = typename Backend::arena_type;
  using Comm = typename Backend::comm_type;

  /// All ranks of `world` call; none returns before all arenas are poisoned.
  template <class Executor>
  RingMemory(const ring::Plan& plan, Comm& world, const GroupComm<Comm>& group, const Executor& executor,
             typename Comm::stream_type s)
      : need_(plan.footprint()),
        persistent_(std::max<std::size_t>(1, need_.persistent)),
        scratch_(std::max<std::size_t>(1, need_.scratch)),
        nan_(std::max<std::size_t>(1, need_.symmetric)),
        staging_(need_.pinned_host) {
    if (plan.transport == Transport::peer) {
      arena_.emplace(group, need_.symmetric + 128);
      auto window = arena_->open(group.ranks(), 128, 0);
      executor.copy(window.base(window.rank()) + 128, nan_.block().data, need_.symmetric, s);
    }
    world.barrier(s);
    world.wait(s);
  }
  Memory<Arena> memory() {
    return {scratch_.block(), persistent_.block(), staging_.block(), arena_ ? &*arena_ : nullptr};
  }

 private:
  Footprint need_;
  typename Backend::Buffer persistent_, scratch_, nan_;
  HostBuffer staging_;  // pageable: its copy ends before bind does
  std::optional<Arena> arena_;
};
/// All calls of this rank are done, and those of its peers: nobody takes a window away from one.
template <class Comm>
void end_calls(Comm& world, const Streams<typename Comm::stream_type>& s) {
  world.wait(s.compute);
  world.wait(s.comm);
  world.barrier(s.compute);
  world.wait(s.compute);
}

/// All ranks of `world`, the cp group, call. `calls` pairs of forward and backward follow each other without a wait;
/// this rank's rows of the last one's results go into `all`. `make_executor(rank, streams)`.
template <class Backend, class T, class MakeExecutor>
void run_ring(typename Backend::comm_type& world, const oracle::Problem& p, const oracle::Inputs& in,
              Transport transport, int calls, MakeExecutor make_executor, oracle::Outputs& all,
              const RingHow& how = {}) {
  using Buffer = typename Backend::Buffer;
  constexpr DeviceKind device = device_kind<typename Backend::comm_type::device_type>;
  const ring::Plan plan = ring_plan(p, world.size(), dtype_of<T>, transport, how);
  const Footprint need = plan.footprint();
  const std::vector<TokenSpans> split =
      how.places ? ring::layout_spans(*how.layout, p.tokens, world.size(), p.cu_seqlens, p.causal) : plan.spans;
  const TokenSpans& mine = split[static_cast<std::size_t>(world.rank())];
  const std::int64_t tokens = mine.tokens();

  const typename Backend::Stream compute, comm;
  const Streams<typename Backend::comm_type::stream_type> s{compute.get(), comm.get()};
  const auto executor = make_executor(world.rank(), s);
  const GroupComm<typename Backend::comm_type> group(world);

  // One row per token: q, k, v and padding, of 16 bytes where heads are as long. The output is contiguous.
  const int k_at = p.q_heads * p.qk_dim, v_at = k_at + p.kv_heads * p.qk_dim, pad_at = v_at + p.kv_heads * p.v_dim;
  const int pitch = pad_at + (p.qk_dim % 8 == 0 && p.v_dim % 8 == 0 ? 8 : 1);
  using Rows = RankRows<Buffer, T>;
  Rows qkv(p.batch * tokens, pitch), dqkv(p.batch * tokens, pitch), poison(p.batch * tokens, pitch);
  Rows out(p.batch * tokens, p.q_heads * p.v_dim), dout(p.batch * tokens, p.q_heads * p.v_dim);
  const auto views = [&](const Rows& rows) {
    return std::array{rows.view(p.batch, tokens, 0, p.q_heads, p.qk_dim, device),
                      rows.view(p.batch, tokens, k_at, p.kv_heads, p.qk_dim, device),
                      rows.view(p.batch, tokens, v_at, p.kv_heads, p.v_dim, device)};
  };
  const auto [q, k, v] = views(qkv);
  const auto [dq, dk, dv] = views(dqkv);
  const TensorRef outs = out.view(p.batch, tokens, 0, p.q_heads, p.v_dim, device);
  const TensorRef douts = dout.view(p.batch, tokens, 0, p.q_heads, p.v_dim, device);

  const auto each = [&](Rows& rows, const TensorRef& t, auto& global, auto f) {
    for (std::int64_t b = 0; b < t.extent(0); ++b) {
      for (std::int64_t i = 0; i < tokens; ++i) {
        for (int h = 0; h < t.extent(2); ++h) {
          const T* row = t.template as<T>() + b * t.stride(0) + i * t.stride(1) + h * t.stride(2);
          const std::size_t at = p.row(b, mine.position(i), static_cast<int>(t.extent(2)), h);
          for (std::int64_t d = 0; d < t.extent(3); ++d) {
            f(rows.host(row + d), global[at * static_cast<std::size_t>(t.extent(3)) + static_cast<std::size_t>(d)]);
          }
        }
      }
    }
  };
  const auto load = [](T& local, double global) { local = static_cast<T>(static_cast<float>(global)); };
  const auto store = [](const T& local, double& global) { global = static_cast<double>(local); };
  each(qkv, q, in.q, load);
  each(qkv, k, in.k, load);
  each(qkv, v, in.v, load);
  each(dout, douts, in.dout, load);
  qkv.upload();
  dout.upload();
  RankRows<Buffer, accumulator_t<T>> lse(1, static_cast<std::int64_t>(need.saved / sizeof(accumulator_t<T>)));
  RingMemory<Backend> memory(plan, world, group, executor, s.compute);
  {
    auto op = ring::bind(plan, executor, group, memory.memory(), s.compute);
    const ring::Work documents = how.places ? plan.documents(p.cu_seqlens, split) : ring::Work();
    const HostBuffer packing(documents.placed_bytes());
    const Buffer placed(std::max<std::size_t>(1, packing.size_bytes()));
    for (int call = 0; call < calls; ++call) {
      executor.copy(out.data(), poison.data(), std::min(out.bytes(), poison.bytes()), s.compute);
      executor.copy(dqkv.data(), poison.data(), dqkv.bytes(), s.compute);
      ring::Saved saved(Block{lse.data(), need.saved});
      if (how.places) {
        op.forward(s, op.place(documents, packing.block(), placed.block(), s.compute), q, k, v, outs, saved);
      } else {
        op.forward(s, q, k, v, outs, saved);
      }
      op.backward(s, douts, saved, dq, dk, dv);
    }
    end_calls(world, s);
  }
  out.download();
  dqkv.download();
  lse.download();
  each(out, outs, all.out, store);
  each(dqkv, dq, all.dq, store);
  each(dqkv, dk, all.dk, store);
  each(dqkv, dv, all.dv, store);
  const auto* const lse_data = reinterpret_cast<const accumulator_t<T>*>(lse.data());
  for (std::int64_t b = 0; b < p.batch; ++b) {
    for (std::int64_t i = 0; i < tokens; ++i) {
      for (int h = 0; h < p.q_heads; ++h) {
        all.lse[p.row(b, mine.position(i), p.q_heads, h)] = lse.host(lse_data + (b * p.q_heads + h) * tokens + i);
      }
    }
  }
  for (std::int64_t row = 0; row < p.batch * tokens; ++row) {  // nobody writes between the views
    const T* const pad = reinterpret_cast<const T*>(dqkv.data()) + row * pitch + pad_at;
    conformance::require(std::isnan(static_cast<float>(dqkv.host(pad))), "padding was written");
  }
}

}  // namespace templates_testing
