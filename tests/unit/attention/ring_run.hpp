// Runs ring attention on host ranks over a whole problem: cuts it, poisons all memory with NaN, and puts the results
// together again.
#pragma once

#include <pleat/attention.hpp>
#include <pleat/comm.hpp>

#include <chrono>
#include <cstring>
#include <thread>

#include "unit/attention/oracle.hpp"

namespace ring_run {

using namespace pleat;

template <class T>
T rounded(double value) {
  if constexpr (std::is_same_v<T, bfloat16>)
    return bfloat16(static_cast<float>(value));
  else
    return static_cast<T>(value);
}
template <class T>
double as_stored(double value) {
  return static_cast<double>(rounded<T>(value));
}

/// The host executor with a thread that dawdles: each call sleeps for a random time, often none.
class JitterExecutor : public HostExecutor {
 public:
  JitterExecutor(unsigned seed, bool active) : generator_(std::make_shared<std::mt19937>(seed)), active_(active) {}
  void record(HostEvent&, HostStream) const { dawdle(); }
  void wait(HostStream, const HostEvent&) const { dawdle(); }
  void copy(void* out, const void* in, std::size_t bytes, HostStream s) const {
    dawdle();
    HostExecutor::copy(out, in, bytes, s);
  }
  void copy_2d(void* out, std::size_t out_pitch, const void* in, std::size_t in_pitch, std::size_t width,
               std::size_t height, HostStream s) const {
    dawdle();
    HostExecutor::copy_2d(out, out_pitch, in, in_pitch, width, height, s);
  }

 private:
  void dawdle() const {
    if (!active_) return;
    const auto draw = (*generator_)();
    if (draw % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(draw / 4 % 300));
  }
  std::shared_ptr<std::mt19937> generator_;
  bool active_;
};
static_assert(executor<JitterExecutor>);

/// A tensor [batch, tokens, heads, dim] that is a view of rows of `pitch` elements per token, from element `first` on.
template <class T>
TensorRef view(std::vector<T>& rows, std::int64_t batch, std::int64_t tokens, std::int64_t pitch, int first, int heads,
               int dim) {
  TensorRef t(rows.empty() ? nullptr : rows.data() + first, dtype_of<T>, {});
  t.push_extent(batch, tokens * pitch);
  t.push_extent(tokens, pitch);
  t.push_extent(heads, dim);
  t.push_extent(dim, 1);
  return t;
}

struct How {
  Transport transport = Transport::collective;
  std::optional<ring::Layout> layout{};
  std::optional<ring::Launches> launches = ring::Launches::per_step;
  unsigned seed = 0;  // of the random delays
  bool delays = false;
  int groups = 1;  // cp groups that run the same problem side by side on one arena; the last one's results are returned
  int calls = 1;   // forward and backward pairs on the same operation; the last one's results are returned
};

template <class T>
oracle::Outputs run(const oracle::Problem& p, const oracle::Inputs& in, int cp, const How& how) {
  const ring::Plan plan =
      ring::plan(cp,
                 {.batch = p.batch,
                  .tokens = p.tokens,
                  .q_heads = p.q_heads,
                  .kv_heads = p.kv_heads,
                  .qk_dim = p.qk_dim,
                  .v_dim = p.v_dim,
                  .dtype = dtype_of<T>,
                  .cu_seqlens = p.cu_seqlens},
                 {.causal = p.causal, .transport = how.transport, .layout = how.layout, .launches = how.launches});
  const double nan = std::numeric_limits<double>::quiet_NaN();
  oracle::Outputs all{std::vector<double>(in.dout.size(), nan), std::vector<double>(p.rows(p.q_heads), nan),
                      std::vector<double>(in.q.size(), nan), std::vector<double>(in.k.size(), nan),
                      std::vector<double>(in.v.size(), nan)};

  run_ranks(cp * how.groups, [&](ThreadComm& world) {
    const int number = world.rank() % how.groups;  // of the group; its ranks stand `groups` apart
    const Group members{number, GroupShape{}.append(how.groups, cp)};
    ThreadComm group = world.split(number, world.rank());
    const int rank = group.rank();
    const TokenSpans& mine = plan.spans[static_cast<std::size_t>(rank)];
    const std::int64_t tokens = mine.tokens();
    const Footprint need = plan.footprint();

    HostArena arena(world, need.symmetric + 128);
    std::memset(arena.open(members, 128, 0).base(rank) + 128, 0xff, need.symmetric);
    HostBuffer scratch(need.scratch, 0xff), lse(need.saved, 0xff), kept(need.saved, 0xff);
    const HostBuffer persistent(need.persistent, 0xff), pinned(need.pinned_host, 0xff);
    Memory<HostArena> memory{scratch.block(), persistent.block(), pinned.block(), &arena};
    world.barrier();
    auto op = ring::bind(plan, JitterExecutor(how.seed + static_cast<unsigned>(world.rank()), how.delays),
                         GroupComm<ThreadComm>(group, members), memory);

    // One row per token: q, k, v and one element of padding. The output is contiguous.
    const int k_at = p.q_heads * p.qk_dim, v_at = k_at + p.kv_heads * p.qk_dim, pad_at = v_at + p.kv_heads * p.v_dim;
    const std::int64_t pitch = pad_at + 1;
    const auto rows = static_cast<std::size_t>(p.batch * tokens);
    const T poison = rounded<T>(nan);
    std::vector<T> qkv(rows * static_cast<std::size_t>(pitch), poison), dqkv(qkv);
    std::vector<T> out(rows * static_cast<std::size_t>(p.q_heads * p.v_dim), poison), dout(out);
    const auto views = [&](std::vector<T>& data) {
      return std::array{view(data, p.batch, tokens, pitch, 0, p.q_heads, p.qk_dim),
                        view(data, p.batch, tokens, pitch, k_at, p.kv_heads, p.qk_dim),
                        view(data, p.batch, tokens, pitch, v_at, p.kv_heads, p.v_dim)};
    };
    const auto [q, k, v] = views(qkv);
    const auto [dq, dk, dv] = views(dqkv);
    const TensorRef outs(out.data(), {p.batch, tokens, p.q_heads, p.v_dim});
    const TensorRef douts(dout.data(), {p.batch, tokens, p.q_heads, p.v_dim});

    const auto each = [&](const TensorRef& t, auto& global, auto f) {
      for (std::int64_t b = 0; b < t.extent(0); ++b) {
        for (std::int64_t i = 0; i < tokens; ++i) {
          for (int h = 0; h < t.extent(2); ++h) {
            T* row = t.as<T>() + b * t.stride(0) + i * t.stride(1) + h * t.stride(2);
            const std::size_t at = p.row(b, mine.position(i), static_cast<int>(t.extent(2)), h);
            for (std::int64_t d = 0; d < t.extent(3); ++d)
              f(row[d], global[at * static_cast<std::size_t>(t.extent(3)) + static_cast<std::size_t>(d)]);
          }
        }
      }
    };
    const auto load = [](T& local, double global) { local = rounded<T>(global); };
    const auto store = [](const T& local, double& global) { global = static_cast<double>(local); };

    for (int call = 0; call < how.calls; ++call) {
      each(q, in.q, load);
      each(k, in.k, load);
      each(v, in.v, load);
      each(douts, in.dout, load);
      ring::Saved saved(lse.block());
      op.forward({}, q, k, v, outs, saved);
      if (how.transport == Transport::collective) std::memset(scratch.data(), 0xff, scratch.size_bytes());
      if (rank % 2 == 1) {  // as a framework does that keeps residuals itself, elsewhere
        std::memcpy(kept.data(), lse.data(), lse.size_bytes());
        std::memset(lse.data(), 0xff, lse.size_bytes());
        saved = op.restore(kept.block(), q, k, v, outs);
      }
      op.backward({}, douts, saved, dq, dk, dv);
      if (rank % 2 == 1) std::memcpy(lse.data(), kept.data(), lse.size_bytes());
      op.check();
    }
    if (number != how.groups - 1) return;
    each(outs, all.out, store);
    each(dq, all.dq, store);
    each(dk, all.dk, store);
    each(dv, all.dv, store);
    for (std::int64_t b = 0; b < p.batch; ++b) {
      for (std::int64_t i = 0; i < tokens; ++i) {
        for (int h = 0; h < p.q_heads; ++h) {
          const auto* data = reinterpret_cast<const accumulator_t<T>*>(lse.data());
          all.lse[p.row(b, mine.position(i), p.q_heads, h)] = data[(b * p.q_heads + h) * tokens + i];
        }
      }
    }
    for (std::size_t row = 0; row < rows; ++row) {  // nobody writes between the views
      const auto value =
          static_cast<double>(dqkv[row * static_cast<std::size_t>(pitch) + static_cast<std::size_t>(pad_at)]);
      if (!std::isnan(value)) all.dq.assign(all.dq.size(), nan);
    }
  });
  return all;
}

/// One rank's operation and its memory, for tests that call it themselves.
struct Bound {
  Bound(const ring::Plan& plan, ThreadComm& world)
      : scratch(plan.footprint().scratch, 0xff),
        persistent(plan.footprint().persistent, 0xff),
        pinned(plan.footprint().pinned_host, 0xff),
        arena(world, plan.footprint().symmetric),
        op(ring::bind(plan, HostExecutor{}, GroupComm<ThreadComm>(world),
                      Memory<HostArena>{scratch.block(), persistent.block(), pinned.block(), &arena})) {}
  HostBuffer scratch, persistent, pinned;
  HostArena arena;
  ring::RingAttention<HostExecutor, ThreadComm, HostArena> op;
};

}  // namespace ring_run
