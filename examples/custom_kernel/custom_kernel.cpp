// Ring attention with a kernel of one's own, on the ranks of one process: custom_kernel [cp]. What 1 rank and cp ranks
// compute must agree, and the gradient must be the slope of the output.
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include <pleat/attention.hpp>
#include <pleat/comm.hpp>

#include "capped_attention.hpp"

namespace {

constexpr int tokens = 48, heads = 4, kv_heads = 2, dim = 8;

/// Of all tokens, in the order of the sequence.
struct Tensors {
  std::vector<float> q, k, v, dout, out, dq, dk, dv;
};

/// The ring on `cp` ranks with scores capped at `cap`.
void attend(int cp, float cap, Tensors& all) {
  const auto plan =
      pleat::ring::plan(cp, {.tokens = tokens, .q_heads = heads, .kv_heads = kv_heads, .qk_dim = dim, .v_dim = dim});
  const pleat::Footprint need = plan.footprint();
  pleat::run_ranks(cp, [&](pleat::ThreadComm& world) {
    const auto& mine = plan.spans[static_cast<std::size_t>(world.rank())];
    pleat::HostBuffer scratch(need.scratch), persistent(need.persistent), pinned(need.pinned_host), lse(need.saved);
    const pleat::Memory<pleat::HostArena> memory{scratch.block(), persistent.block(), pinned.block()};

    CappedAttention kernel;
    kernel.cap = cap;
    auto op =
        pleat::ring::bind(plan, pleat::HostExecutor{}, pleat::GroupComm<pleat::ThreadComm>(world), memory, {}, kernel);

    // Copies this rank's rows of a tensor out of the whole, or into it.
    const auto rows = [&](std::vector<float>& local, std::vector<float>& whole, int width, bool into) {
      for (std::int64_t i = 0; i < mine.tokens(); ++i) {
        for (int x = 0; x < width; ++x) {
          float& here = local[static_cast<std::size_t>(i * width + x)];
          float& there = whole[static_cast<std::size_t>(mine.position(i) * width + x)];
          (into ? there : here) = into ? here : there;
        }
      }
    };
    Tensors t;
    const auto tensor = [&](std::vector<float>& local, std::vector<float>& whole, int count) {
      local.resize(static_cast<std::size_t>(mine.tokens() * count * dim));
      rows(local, whole, count * dim, false);
      return pleat::TensorRef(local.data(), {1, mine.tokens(), count, dim});
    };
    const auto q = tensor(t.q, all.q, heads), k = tensor(t.k, all.k, kv_heads), v = tensor(t.v, all.v, kv_heads);
    const auto dout = tensor(t.dout, all.dout, heads), out = tensor(t.out, all.out, heads);
    const auto dq = tensor(t.dq, all.dq, heads), dk = tensor(t.dk, all.dk, kv_heads),
               dv = tensor(t.dv, all.dv, kv_heads);
    pleat::ring::Saved saved(lse.block());
    op.forward({}, q, k, v, out, saved);
    op.backward({}, dout, saved, dq, dk, dv);
    rows(t.out, all.out, heads * dim, true);
    rows(t.dq, all.dq, heads * dim, true);
    rows(t.dk, all.dk, kv_heads * dim, true);
    rows(t.dv, all.dv, kv_heads * dim, true);
  });
}

double largest_difference(const std::vector<float>& x, const std::vector<float>& y) {
  double most = 0;
  for (std::size_t i = 0; i < x.size(); ++i) most = std::fmax(most, std::fabs(static_cast<double>(x[i]) - y[i]));
  return most;
}
double dot(const std::vector<float>& x, const std::vector<float>& y) {
  double sum = 0;
  for (std::size_t i = 0; i < x.size(); ++i) sum += static_cast<double>(x[i]) * y[i];
  return sum;
}

Tensors random_inputs() {
  std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  Tensors t;
  for (auto* x : {&t.q, &t.dout, &t.out, &t.dq}) x->resize(tokens * heads * dim);
  for (auto* x : {&t.k, &t.v, &t.dk, &t.dv}) x->resize(tokens * kv_heads * dim);
  for (auto* x : {&t.q, &t.k, &t.v, &t.dout})
    for (float& value : *x) value = normal(generator);
  return t;
}

}  // namespace

int main(int argc, char** argv) {
  int cp = 4;
  if (argc > 1) {
    const char* const end = argv[1] + std::strlen(argv[1]);
    const auto [stop, failure] = std::from_chars(argv[1], end, cp);
    const bool is_number = failure == std::errc{} && stop == end;
    if (argc > 2 || !is_number || cp < 1 || cp > tokens / 2 || tokens % (2 * cp) != 0) {
      std::fprintf(stderr, "custom_kernel: cp \"%s\"; valid: one number of 1 2 3 4 6 8 12 24\n", argv[argc - 1]);
      return 2;
    }
  }
  const float cap = 1;
  Tensors alone = random_inputs();
  attend(1, cap, alone);

  Tensors ring = random_inputs();
  attend(cp, cap, ring);
  double apart = 0;
  for (const auto part : {&Tensors::out, &Tensors::dq, &Tensors::dk, &Tensors::dv}) {
    apart = std::fmax(apart, largest_difference(alone.*part, ring.*part));
  }

  // Along a direction of q and k: <dout, change of out> per step is <dq, direction> + <dk, direction>.
  const float step = 1e-2f;
  Tensors ahead = random_inputs(), behind = random_inputs();
  const auto move = [&](Tensors& t, float by) {
    for (std::size_t i = 0; i < t.q.size(); ++i) t.q[i] += by * alone.dout[i];
    for (std::size_t i = 0; i < t.k.size(); ++i) t.k[i] += by * alone.v[i];
    attend(1, cap, t);
  };
  move(ahead, step);
  move(behind, -step);
  const double slope = (dot(alone.dout, ahead.out) - dot(alone.dout, behind.out)) / (2 * static_cast<double>(step));
  const double gradient = dot(alone.dq, alone.dout) + dot(alone.dk, alone.v);

  Tensors uncapped = random_inputs();
  attend(cp, 1e6f, uncapped);
  std::printf("1 rank and %d ranks differ by at most %.1e\n", cp, apart);
  std::printf("gradient %.4f, slope %.4f\n", gradient, slope);
  std::printf("without the cap the output differs by up to %.2f\n", largest_difference(uncapped.out, ring.out));
  const bool is_right = apart < 1e-5 && std::fabs(gradient - slope) < 1e-2 * std::fabs(slope) &&
                        largest_difference(uncapped.out, ring.out) > 0.01;
  std::puts(is_right ? "the ring computes with the kernel it was given" : "WRONG");
  return is_right ? 0 : 1;
}
