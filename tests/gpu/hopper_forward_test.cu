// The Hopper forward kernel against float64: shapes, work, resumed results, budgets of CTAs.
#include <pleat/attention/cuda/hopper_forward.cuh>

#include "attention_cases.cuh"
#include "skip.hpp"

namespace hopper_forward_testing {
using namespace attention_cases;

int failures = 0;
void expect(bool good) {
  if (!good) ++failures;
}

/// float64 beside the kernel, over a sequence of calls that share queries.
template <class T, class Dims>
class Run {
  using Kernel = HopperForward<T, forward_tiling<Dims>>;

 public:
  explicit Run(const Inputs<T>& in)
      : o_acc(in.q_rows_count() * in.s.v_dim),
        lse(in.q_rows_count()),
        out(in.q_rows_count() * in.s.v_dim),
        o64(in.q_rows_count() * in.s.v_dim),
        lse64(in.q_rows_count()) {
    o_acc.poison();
    lse.poison();
    out.poison();
    o64.poison();
    lse64.poison();
  }
  void call(const Inputs<T>& in, bool first, bool last, int max_ctas = 0) {
    Forward<T> a = in.forward(o_acc.data(), lse.data(), out.data(), first, last);
    reference_attention::forward(a, {o64.data(), lse64.data()});
    a.max_ctas = max_ctas;
    if (!Kernel::takes(a)) {
      std::puts("  FAILED: not taken");
      ++failures;
      return;
    }
    Kernel::run(a, nullptr);
    check_cuda(cudaDeviceSynchronize(), "HopperForward");
  }
  void compare(const Inputs<T>& in, bool last) const {
    const Shape& s = in.s;
    const bool half = std::is_same_v<T, float16>;
    const std::vector<double> expected = o64.host(), expected_lse = lse64.host();
    double largest = 0;
    for (const double x : expected) largest = std::max(largest, std::abs(x));
    const double most = (half ? 2e-3 : 1.2e-2) * largest + 1e-6;
    if (last) {
      expect(agrees("out", out, in.q_rows(out.data(), s.v_dim), expected, s.batch, s.q_tokens, s.q_heads, s.v_dim,
                    half ? 5e-4 : 3.5e-3, most));
    } else {
      expect(agrees("o_acc", o_acc, in.q_rows(o_acc.data(), s.v_dim), expected, s.batch, s.q_tokens, s.q_heads, s.v_dim,
                    half ? 4e-4 : 3e-3, most));
    }
    const std::vector<float> got = lse.host();
    std::size_t i = 0, wrong = 0;
    double off = 0;
    for (int b = 0; b < s.batch; ++b) {
      for (std::int64_t t = 0; t < s.q_tokens; ++t) {
        for (int h = 0; h < s.q_heads; ++h, ++i) {
          const float x = got[(static_cast<std::size_t>(b) * s.q_heads + h) * s.q_tokens + t];
          const double e = expected_lse[i];
          const bool good = e == -INFINITY ? x == -INFINITY : std::abs(x - e) <= 1e-4 + 1e-6 * std::abs(e);
          if (!good && wrong++ == 0) {
            std::printf("  FAILED lse [b%d t%lld h%d] expected %.6g got %.6g\n", b, static_cast<long long>(t), h, e, x);
          }
          if (e != -INFINITY) off = std::max(off, std::abs(x - e));
        }
      }
    }
    std::printf("  %s lse max %.2e, wrong %zu\n", wrong == 0 ? "ok    " : "FAILED", off, wrong);
    expect(wrong == 0);
  }

  Array<float> o_acc, lse;
  Array<T> out;
  Array<double> o64, lse64;
};

template <class T, class Dims>
void test_one(const char* name, const Shape& shape) {
  std::printf("%s: b%d %d/%d heads, %lldx%lld, %d/%d\n", name, shape.batch, shape.q_heads, shape.kv_heads,
              static_cast<long long>(shape.q_tokens), static_cast<long long>(shape.k_tokens), shape.qk_dim,
              shape.v_dim);
  const Inputs<T> in(shape);
  Run<T, Dims> run(in);
  run.call(in, true, true);
  run.compare(in, true);
  const std::vector<T> out = run.out.host();
  const std::vector<float> lse = run.lse.host();
  for (const int ctas : {1, 7}) {
    run.out.poison();
    run.call(in, true, true, ctas);
    expect(same_bits("out of few CTAs", out, run.out.host()) && same_bits("lse of few CTAs", lse, run.lse.host()));
  }
}

/// Three blocks of keys, as a ring visits them; the middle one gives only the late queries anything.
template <class T, class Dims>
void test_resumed(const char* name, Shape shape) {
  std::printf("%s, in three calls\n", name);
  Inputs<T> in(shape);
  Run<T, Dims> run(in);
  run.call(in, true, false);
  run.compare(in, false);
  const std::int64_t half = shape.q_tokens / 2;
  for (int step = 0; step < 2; ++step) {
    Shape next = shape;
    next.work = step == 0 ? std::vector<Rectangle>{{half, shape.q_tokens, 0, shape.k_tokens}}
                          : std::vector<Rectangle>{{0, shape.q_tokens, 0, shape.k_tokens / 2}};
    Inputs<T> other(next);
    other.q = std::move(in.q);
    if (step == 1) {  // keys that no query sees hold anything
      const std::size_t seen = static_cast<std::size_t>(shape.k_tokens / 2 * shape.kv_heads);
      other.k.poison();
      other.v.poison();
      for (int b = 0; b < shape.batch; ++b) {
        const std::size_t at = static_cast<std::size_t>(b * shape.k_tokens * shape.kv_heads);
        const Array<T> k = normal<T>(seen * shape.qk_dim), v = normal<T>(seen * shape.v_dim);
        check_cuda(
            cudaMemcpy(other.k.data() + at * shape.qk_dim, k.data(), k.count() * sizeof(T), cudaMemcpyDeviceToDevice),
            "copy");
        check_cuda(
            cudaMemcpy(other.v.data() + at * shape.v_dim, v.data(), v.count() * sizeof(T), cudaMemcpyDeviceToDevice),
            "copy");
      }
    }
    const std::vector<float> before = run.o_acc.host(), lse_before = run.lse.host();
    run.call(other, false, step == 1);
    run.compare(other, step == 1);
    if (step == 0) {  // early queries saw nothing: their bits stay
      const std::vector<float> after = run.o_acc.host(), lse_after = run.lse.host();
      const std::size_t kept = static_cast<std::size_t>(half) * shape.q_heads * shape.v_dim;
      expect(same_bits<float>("o_acc of rows without work", {before.begin(), before.begin() + kept},
                              {after.begin(), after.begin() + kept}));
      expect(same_bits<float>("lse of rows without work", {lse_before.begin(), lse_before.begin() + half},
                              {lse_after.begin(), lse_after.begin() + half}));
    }
    in.q = std::move(other.q);
  }
}

template <class T, class Dims>
void test_dims(const char* type) {
  constexpr int qk = Dims::qk, v = Dims::v;
  std::printf("--- %s %d/%d\n", type, qk, v);
  test_one<T, Dims>("one full tile", {1, 1, 1, 128, 128, qk, v, full(128, 128)});
  test_one<T, Dims>("two full tiles", {1, 1, 1, 128, 256, qk, v, full(128, 256)});
  test_one<T, Dims>("five full tiles, two of queries", {1, 2, 1, 256, 640, qk, v, full(256, 640)});
  for (const Named& one : common_cases(qk, v, 40)) test_one<T, Dims>(one.name, one.shape);
  test_resumed<T, Dims>("causal, grouped", {2, 4, 2, 300, 300, qk, v, causal(300)});
}
}  // namespace hopper_forward_testing

int main(int, char** arguments) {
  using namespace hopper_forward_testing;
  if (gpu_testing::lacks_hopper()) return gpu_testing::skipped;
  const unsigned seed =
      arguments[1] != nullptr ? static_cast<unsigned>(std::stoul(arguments[1])) : std::random_device{}();
  engine(seed);
  std::printf("seed %u\n", seed);
  test_dims<bfloat16, HeadDims<128, 128>>("bf16");
  test_dims<bfloat16, HeadDims<64, 64>>("bf16");
  test_dims<bfloat16, HeadDims<192, 128>>("bf16");
  test_dims<bfloat16, HeadDims<256, 256>>("bf16");
  test_dims<float16, HeadDims<128, 128>>("f16");
  test_one<bfloat16, HeadDims<128, 128>>(
      "more tiles than are sorted one by one",
      {1, 1, 1, 132000, 300, 128, 128, {{7, 300, 0, 300, 0}, {70000, 70500, 0, 80}, {130500, 131900, 10, 250}}});
  std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
