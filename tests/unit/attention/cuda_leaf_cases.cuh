// Cases of the local kernel's contract on a GPU, against the host's kernel in float64: which pairs, which strides, in
// how many calls. All that a kernel writes starts as NaN, and so does what lies between its rows.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include <pleat/attention/cuda/cuda_attention.cuh>
#include <pleat/attention/host/leaf.hpp>
#include <pleat/cuda/buffer.hpp>

#include <support/copy_now.hpp>

namespace attention_testing {

using namespace pleat;

/// A copy from pageable memory, or a fill, may end after the call has; no other stream waits for it.
inline void finish_uploads() {
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

/// How rows lie in memory: without gaps, behind 16 bytes of another tensor, or at odd addresses.
enum class Rows { contiguous, aligned, odd };

/// One tensor in memory [outer, middle, inner...]: on the GPU, with NaN wherever nothing was put.
template <class T>
class DeviceTensor {
 public:
  DeviceTensor(Rows rows, std::int64_t batch, std::int64_t tokens, int heads, int dim)
      : gap_(rows == Rows::contiguous ? 0
             : rows == Rows::aligned  ? 16 / static_cast<int>(sizeof(T))
                                      : 1),
        shape_{batch, tokens, heads, dim},
        pitch_(static_cast<std::int64_t>(heads) * dim + gap_),
        host_(static_cast<std::size_t>(batch * tokens * pitch_ + gap_), T(std::nanf(""))),
        device_(std::max<std::size_t>(16, host_.size() * sizeof(T))) {
    upload();
  }

  TensorRef ref() const {
    TensorRef t(reinterpret_cast<T*>(device_.data()) + gap_, dtype_of<T>, {}, {DeviceKind::cuda, 0});
    const std::int64_t strides[] = {shape_[1] * pitch_, pitch_, shape_[3], 1};
    for (int axis = 0; axis < 4; ++axis) t.push_extent(shape_[axis], strides[axis]);
    return t;
  }
  /// The same memory as [batch, heads, tokens], where dim is 1.
  TensorRef statistics() const {
    TensorRef t(reinterpret_cast<T*>(device_.data()) + gap_, dtype_of<T>, {}, {DeviceKind::cuda, 0});
    t.push_extent(shape_[0], shape_[1] * pitch_);
    t.push_extent(shape_[2], 1);
    t.push_extent(shape_[1], pitch_);
    return t;
  }
  void put(const std::vector<double>& values) {
    for_each([&](T& element, std::size_t i) { element = T(static_cast<float>(values[i])); });
    upload();
  }
  void poison() {
    for_each([&](T& element, std::size_t) { element = T(std::nanf("")); });
    upload();
  }
  /// Empty when something between the rows was written.
  std::vector<double> get() {
    testing_support::copy_now(host_.data(), device_.data(), host_.size() * sizeof(T));
    std::vector<double> values(static_cast<std::size_t>(shape_[0] * shape_[1] * shape_[2] * shape_[3]));
    for_each([&](T& element, std::size_t i) {
      values[i] = static_cast<double>(static_cast<float>(element));
      element = T(std::nanf(""));
    });
    for (const T& gap : host_) {
      if (!std::isnan(static_cast<float>(gap))) return {};
    }
    return values;
  }

 private:
  void upload() {
    testing_support::copy_now(device_.data(), host_.data(), host_.size() * sizeof(T));
    finish_uploads();
  }
  template <class F>
  void for_each(F f) {
    const std::int64_t width = shape_[2] * shape_[3];
    for (std::int64_t row = 0; row < shape_[0] * shape_[1]; ++row) {
      for (std::int64_t i = 0; i < width; ++i) {
        f(host_[static_cast<std::size_t>(gap_ + row * pitch_ + i)], static_cast<std::size_t>(row * width + i));
      }
    }
  }

  int gap_;
  std::int64_t shape_[4], pitch_;
  std::vector<T> host_;
  CudaBuffer device_;
};

using Calls = std::vector<std::vector<Rectangle>>;  // the work of each call of a sequence

struct LeafCase {
  std::string name;
  std::int64_t batch = 1, q_tokens = 0, k_tokens = 0;
  int q_heads = 1, kv_heads = 1, qk_dim = 0, v_dim = 0;
  Calls calls{};
  Rows rows = Rows::contiguous;
  double logits = 1;         // a factor of every third key
  bool accumulates = false;  // dq, dk and dv are added to what they hold
  bool is_flat = false;      // scale 0: all keys weigh the same
};

/// The cases for kernels of some head dims.
inline std::vector<LeafCase> leaf_cases(int qk, int v) {
  std::vector<LeafCase> cases;
  std::mt19937 random(std::random_device{}());
  const auto causal = [](std::int64_t n) { return Calls{{{0, n, 0, n, 0}}}; };
  cases.push_back({"causal, GQA, a batch", 2, 113, 113, 4, 2, qk, v, causal(113)});
  cases.push_back({"full, MQA", 1, 70, 150, 3, 1, qk, v, {{{0, 70, 0, 150}}}});
  cases.push_back({"many tiles", 1, 390, 390, 2, 1, qk, v, causal(390)});
  cases.push_back({"queries that see nothing", 1, 4, 2, 1, 1, qk, v, {{{0, 4, 0, 2, -2}}}});
  cases.push_back({"keys nobody sees", 1, 40, 300, 2, 2, qk, v, {{{10, 40, 130, 180, 3}}}});
  cases.push_back({"no work", 1, 130, 70, 2, 1, qk, v, {{}}});
  cases.push_back({"no queries", 1, 0, 70, 2, 1, qk, v, {{}}});
  cases.push_back({"rectangles of all kinds",
                   1,
                   230,
                   170,
                   2,
                   1,
                   qk,
                   v,
                   {{{0, 60, 0, 50, 20}, {30, 190, 50, 170}, {60, 190, 0, 30}, {70, 190, 30, 50, -7}}}});
  std::vector<Rectangle> documents;
  for (std::int64_t at = 0; at < 400;) {
    const std::int64_t end = std::min<std::int64_t>(400, at + 1 + static_cast<std::int64_t>(random() % 13));
    documents.push_back({at, end, at, end, 0});
    at = end;
  }
  cases.push_back({"many documents", 1, 410, 410, 2, 1, qk, v, {documents}});
  cases.push_back({"a sequence of calls, one without work",
                   1,
                   200,
                   150,
                   4,
                   2,
                   qk,
                   v,
                   {{{0, 100, 0, 50, 0}}, {}, {{50, 200, 50, 100}}, {{0, 200, 100, 150}}}});
  cases.push_back({"large logits, a sequence of calls",
                   1,
                   140,
                   140,
                   2,
                   1,
                   qk,
                   v,
                   {{{0, 140, 0, 40}}, {{0, 140, 40, 100, 7}}, {{100, 140, 100, 140, 0}}},
                   Rows::contiguous,
                   60});
  cases.push_back({"first alone, then last without work", 1, 90, 90, 2, 1, qk, v, {{{0, 90, 0, 90, 0}}, {}}});
  cases.push_back({"gradients are added", 1, 150, 150, 4, 2, qk, v, causal(150), Rows::contiguous, 1, true});
  cases.push_back({"rows with gaps", 2, 90, 140, 2, 1, qk, v, {{{5, 90, 0, 140, 50}}}, Rows::aligned, 1, true});
  cases.push_back(
      {"odd addresses", 2, 90, 140, 2, 1, qk, v, {{{0, 50, 0, 80, 30}}, {{40, 90, 80, 140}}}, Rows::odd, 1, true});
  cases.push_back({"scale 0", 1, 100, 100, 2, 1, qk, v, causal(100)});
  cases.back().is_flat = true;
  cases.push_back({"smaller head dims", 1, 140, 140, 2, 1, qk - 24, v - 8, causal(140)});
  cases.push_back({"head dims of no alignment", 1, 140, 140, 2, 1, qk - 51, v - 59, causal(140), Rows::odd});
  return cases;
}

struct Deviation {
  double relative_l2 = 0, relative_max = 0;
};
/// Rows of -inf must be the same.
inline Deviation deviation(const std::vector<double>& got, const std::vector<double>& want, const char* what,
                           std::string& failure, double tolerance) {
  if (got.size() != want.size()) {
    failure += std::string(" ") + what + ": written between its rows;";
    return {};
  }
  if (want.empty()) return {};
  double square = 0, norm = 0, largest = 0, scale = 0;
  std::size_t worst = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    if (got[i] == want[i]) continue;  // also -inf
    const double difference = std::abs(got[i] - want[i]);
    square += difference * difference;
    if (!(difference <= largest)) {
      if (!std::isnan(largest)) worst = i;
      largest = difference;
    }
  }
  for (const double value : want) {
    if (std::isinf(value)) continue;
    norm += value * value;
    scale = std::max(scale, std::abs(value));
  }
  const double count = static_cast<double>(want.size());
  const Deviation d{std::sqrt(square) / std::max(std::sqrt(norm), 1e-3 * std::sqrt(count)),
                    largest / std::max(scale, 1e-3)};
  if (!(d.relative_l2 <= tolerance) || !(d.relative_max <= 12 * tolerance)) {
    std::size_t first = 0;
    while (first < want.size() && std::abs(got[first] - want[first]) <= 12 * tolerance * std::max(scale, 1e-3)) ++first;
    char text[256];
    std::snprintf(text, sizeof text, " %s: L2 %.2e, max %.2e; worst [%zu] %g, not %g; first [%zu] %g, not %g;", what,
                  d.relative_l2, d.relative_max, worst, got[worst], want[worst], first,
                  first < got.size() ? got[first] : 0, first < want.size() ? want[first] : 0);
    failure += text;
  }
  return d;
}

/// Errors of one case, and what is wrong: empty when nothing is.
struct LeafResult {
  Deviation out, lse, dq, dk, dv;
  std::string failure;
};

/// `rounding`: a factor of what the results may be off.
template <class T, class Leaf>
LeafResult check_leaf(const LeafCase& c, unsigned seed, const Leaf& leaf = {}, double rounding = 1) {
  constexpr bool plans_ahead = requires(const AttentionForward& call) {
    leaf.prepare(call);
  };
  const double scale = c.is_flat ? 0 : 1 / std::sqrt(static_cast<double>(c.qk_dim));
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  const auto draw = [&](std::int64_t tokens, int heads, int dim, bool rounds = true) {
    std::vector<double> values(static_cast<std::size_t>(c.batch * tokens * heads * dim));
    for (double& value : values) {
      value = normal(random);
      if (rounds) value = static_cast<double>(static_cast<float>(T(static_cast<float>(value))));
    }
    return values;
  };
  std::vector<double> q = draw(c.q_tokens, c.q_heads, c.qk_dim), k = draw(c.k_tokens, c.kv_heads, c.qk_dim),
                      v = draw(c.k_tokens, c.kv_heads, c.v_dim), dout = draw(c.q_tokens, c.q_heads, c.v_dim);
  if (c.logits != 1) {
    for (std::size_t i = 0; i < k.size(); ++i) {
      if (i / static_cast<std::size_t>(c.qk_dim) % 3 == 0)
        k[i] = static_cast<double>(static_cast<float>(T(static_cast<float>(c.logits * k[i]))));
    }
  }
  std::vector<double> dq = draw(c.q_tokens, c.q_heads, c.qk_dim), dk = draw(c.k_tokens, c.kv_heads, c.qk_dim),
                      dv = draw(c.k_tokens, c.kv_heads, c.v_dim);
  for (auto* values : {&dq, &dk, &dv}) {
    for (double& value : *values) value = static_cast<double>(static_cast<float>(value));
  }

  // on the GPU
  CudaStream stream;
  const auto tensor = [&]<class E>(std::type_identity<E>, std::int64_t tokens, int heads, int dim) {
    return DeviceTensor<E>(c.rows, c.batch, tokens, heads, dim);
  };
  constexpr std::type_identity<T> stored{};
  constexpr std::type_identity<float> sums{};
  auto q_on = tensor(stored, c.q_tokens, c.q_heads, c.qk_dim), k_on = tensor(stored, c.k_tokens, c.kv_heads, c.qk_dim),
       v_on = tensor(stored, c.k_tokens, c.kv_heads, c.v_dim), dout_on = tensor(stored, c.q_tokens, c.q_heads, c.v_dim),
       out_on = tensor(stored, c.q_tokens, c.q_heads, c.v_dim);
  auto acc_on = tensor(sums, c.q_tokens, c.q_heads, c.v_dim), lse_on = tensor(sums, c.q_tokens, c.q_heads, 1),
       delta_on = tensor(sums, c.q_tokens, c.q_heads, 1), dq_on = tensor(sums, c.q_tokens, c.q_heads, c.qk_dim),
       dk_on = tensor(sums, c.k_tokens, c.kv_heads, c.qk_dim), dv_on = tensor(sums, c.k_tokens, c.kv_heads, c.v_dim);
  q_on.put(q);
  k_on.put(k);
  v_on.put(v);
  dout_on.put(dout);
  std::size_t rectangles = 0;
  for (const auto& work : c.calls) rectangles += work.size();
  const CudaBuffer work_on(std::max<std::size_t>(1, rectangles) * sizeof(Rectangle));
  std::vector<WorkView> views;
  rectangles = 0;
  for (const auto& work : c.calls) {
    auto* const at = reinterpret_cast<Rectangle*>(work_on.data()) + rectangles;
    testing_support::copy_now(at, work.data(), work.size() * sizeof(Rectangle));
    views.emplace_back(work, at);
    rectangles += work.size();
  }
  struct Results {
    std::vector<double> out, lse, dq, dk, dv;
    bool operator==(const Results& other) const {
      const auto same = [](const std::vector<double>& a, const std::vector<double>& b) {
        return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0;
      };
      return same(out, other.out) && same(lse, other.lse) && same(dq, other.dq) && same(dk, other.dk) &&
             same(dv, other.dv);
    }
  };
  const CudaBuffer workspace(attention_workspace_bytes(c.batch, c.q_heads, c.q_tokens));
  check_cuda(cudaMemset(workspace.data(), 0xff, workspace.size_bytes()), "cudaMemset");
  finish_uploads();
  LeafResult result;
  const auto run = [&](int max_ctas) {
    for (DeviceTensor<float>* t : {&acc_on, &lse_on, &delta_on}) t->poison();
    out_on.poison();
    dq_on.poison(), dk_on.poison(), dv_on.poison();
    if (c.accumulates) dq_on.put(dq), dk_on.put(dk), dv_on.put(dv);
    AttentionForward forward{q_on.ref(), k_on.ref(),   v_on.ref(),          {},
                             scale,      acc_on.ref(), lse_on.statistics(), out_on.ref()};
    forward.max_ctas = max_ctas;
    for (std::size_t i = 0; i < views.size(); ++i) {
      forward.work = views[i];
      forward.first = i == 0;
      forward.last = i + 1 == views.size();
      if (forward.last && i > 0) {
        check_cuda(cudaStreamSynchronize(stream), "forward");
        for (const double value : out_on.get()) {
          if (!std::isnan(value)) result.failure = " out was written before the last call;";
        }
      }
      if constexpr (plans_ahead) leaf.prepare(forward);
      leaf.forward(forward, stream);
    }
    leaf.delta(delta_on.statistics(), out_on.ref(), dout_on.ref(), stream);
    AttentionBackward backward{
        q_on.ref(), k_on.ref(), v_on.ref(),  dout_on.ref(), lse_on.statistics(), delta_on.statistics(),
        {},         scale,      dq_on.ref(), dk_on.ref(),   dv_on.ref()};
    backward.max_ctas = max_ctas;
    backward.workspace = workspace.data();
    backward.out = out_on.ref();
    for (std::size_t i = 0; i < views.size(); ++i) {
      backward.work = views[i];
      backward.accumulate_dq = backward.accumulate_dk = backward.accumulate_dv = c.accumulates || i > 0;
      if constexpr (plans_ahead) leaf.prepare(backward);
      leaf.backward(backward, stream);
    }
    check_cuda(cudaStreamSynchronize(stream), "backward");
    return Results{out_on.get(), lse_on.get(), dq_on.get(), dk_on.get(), dv_on.get()};
  };
  const Results got = run(0);
  for (const int max_ctas : {1, 3}) {  // those that plan ahead have no such budget
    if (!(run(plans_ahead ? 0 : max_ctas) == got))
      result.failure += " the bits depend on the number of CTAs or the run;";
  }
  auto rounded_on = tensor(stored, c.q_tokens, c.q_heads, c.qk_dim);
  auto second_on = tensor(sums, c.q_tokens, c.q_heads, c.qk_dim);
  second_on.put(dq);
  const TensorRef terms[] = {dq_on.ref(), second_on.ref()};
  for (const std::size_t count : {1, 2}) {
    rounded_on.poison();
    leaf.store(rounded_on.ref(), {terms, count}, stream);
    check_cuda(cudaStreamSynchronize(stream), "store");
    std::vector<double> rounded;
    for (std::size_t i = 0; i < dq.size(); ++i) {
      const auto sum = static_cast<float>(got.dq[i]) + (count == 2 ? static_cast<float>(dq[i]) : 0);
      rounded.push_back(static_cast<double>(static_cast<float>(T(sum))));
    }
    deviation(rounded_on.get(), rounded, "store", result.failure, 0);
  }

  // on the host, in float64
  std::vector<double> out(dout.size()), acc(dout.size()),
      lse(static_cast<std::size_t>(c.batch * c.q_tokens * c.q_heads)), delta(lse);
  const auto ref = [&](std::vector<double>& values, std::int64_t tokens, int heads, int dim) {
    return TensorRef(values.data(), {c.batch, tokens, heads, dim});
  };
  const auto statistics = [&](std::vector<double>& values) {
    TensorRef t(values.data(), dtype_of<double>, {});
    t.push_extent(c.batch, c.q_tokens * c.q_heads);
    t.push_extent(c.q_heads, 1);
    t.push_extent(c.q_tokens, c.q_heads);
    return t;
  };
  const TensorRef q_ref = ref(q, c.q_tokens, c.q_heads, c.qk_dim), k_ref = ref(k, c.k_tokens, c.kv_heads, c.qk_dim),
                  v_ref = ref(v, c.k_tokens, c.kv_heads, c.v_dim), dout_ref = ref(dout, c.q_tokens, c.q_heads, c.v_dim),
                  out_ref = ref(out, c.q_tokens, c.q_heads, c.v_dim);
  using Host = attention_leaf<host_device>;
  for (std::size_t i = 0; i < c.calls.size(); ++i) {
    Host::forward(AttentionForward{q_ref, k_ref, v_ref, c.calls[i], scale, ref(acc, c.q_tokens, c.q_heads, c.v_dim),
                                   statistics(lse), out_ref, i == 0, i + 1 == c.calls.size()},
                  {});
  }
  // Of the stored outputs: where a query sees one key, delta and <dout, v> are equal but for the rounding of out.
  std::vector<double> stored_out = got.out;
  Host::delta(statistics(delta), ref(stored_out, c.q_tokens, c.q_heads, c.v_dim), dout_ref, {});
  for (std::size_t i = 0; i < c.calls.size(); ++i) {
    const bool adds = c.accumulates || i > 0;
    Host::backward({q_ref, k_ref, v_ref, dout_ref, statistics(lse), statistics(delta), c.calls[i], scale,
                    ref(dq, c.q_tokens, c.q_heads, c.qk_dim), ref(dk, c.k_tokens, c.kv_heads, c.qk_dim),
                    ref(dv, c.k_tokens, c.kv_heads, c.v_dim), adds, adds, adds},
                   {});
  }
  // Rounding: 2^-9 of a bfloat16, 2^-12 of a float16; out rounds the weights and itself, gradients dS and P too.
  const double unit = std::is_same_v<T, bfloat16> ? 0x1p-9 : 0x1p-12;
  const double factor = rounding * (c.logits == 1 ? 1 : 3);  // large scores round more in float
  result.out = deviation(got.out, out, "out", result.failure, 1.5 * unit * factor);
  result.lse = deviation(got.lse, lse, "lse", result.failure, 1e-5);
  result.dq = deviation(got.dq, dq, "dq", result.failure, 4 * unit * factor);
  result.dk = deviation(got.dk, dk, "dk", result.failure, 4 * unit * factor);
  result.dv = deviation(got.dv, dv, "dv", result.failure, 2.5 * unit * factor);
  return result;
}

}  // namespace attention_testing
