// The Hopper backward kernels against float64: shapes, work, gradients that are added to, reproducible bits.
#include <pleat/attention/cuda/hopper_backward.cuh>
#include <pleat/attention/cuda/hopper_gradients.cuh>

#include <support/repeats.hpp>

#include "attention_cases.cuh"
#include "delays.cuh"
#include "skip.hpp"

namespace hopper_backward_testing {
using namespace attention_cases;

int failures = 0;
void expect(bool good) {
  if (!good) ++failures;
}

template <class T, class Kernel>
struct Run {
  explicit Run(const Inputs<T>& inputs)
      : in(inputs),
        dout(normal<T>(in.q_rows_count() * in.s.v_dim)),
        lse(in.q_rows_count()),
        delta(in.q_rows_count()),
        dq(in.q_rows_count() * in.s.qk_dim),
        dk(in.k_rows_count() * in.s.qk_dim),
        dv(in.k_rows_count() * in.s.v_dim),
        workspace(attention_workspace_bytes(in.s.batch, in.s.q_heads, in.s.q_tokens) / sizeof(unsigned)) {
    Array<double> o64(dq.count() / in.s.qk_dim * in.s.v_dim), lse64(lse.count());
    o64.poison();
    lse64.poison();
    reference_attention::forward(in.forward(nullptr, lse.data(), nullptr, true, true), {o64.data(), lse64.data()});
    round_statistics<<<1024, 1>>>(call(false, true), o64.data(), lse64.data());
    check_launch("round_statistics");
  }
  Backward<T> call(bool accumulate, bool deterministic) const {
    return in.backward(dout.data(), lse.data(), delta.data(), dq.data(), dk.data(), dv.data(), accumulate,
                       deterministic);
  }
  void run(bool accumulate, bool deterministic, int max_ctas = 0) const {
    Backward<T> a = call(accumulate, deterministic);
    a.max_ctas = max_ctas;
    a.workspace = workspace.data();
    if (!accumulate) {
      dq.poison();
      dk.poison();
      dv.poison();
    }
    workspace.poison();
    if (!Kernel::takes(a)) {
      std::puts("  FAILED: not taken");
      ++failures;
      return;
    }
    Kernel::run(a, nullptr);
    check_cuda(cudaDeviceSynchronize(), "HopperBackward");
  }
  void compare(double times) const {
    const Shape& s = in.s;
    const double l2 = std::is_same_v<T, float16> ? 8e-4 : 6e-3;
    const Array<double> q64(dq.count()), k64(dk.count()), v64(dv.count());
    q64.zero();
    k64.zero();
    v64.zero();
    reference_attention::backward(call(false, true), {q64.data(), k64.data(), v64.data()});
    const auto one = [&](const char* what, const Array<float>& got, const HeadRows<float>& rows,
                         const Array<double>& expected, std::int64_t tokens, int heads, int dim) {
      std::vector<double> x = expected.host();
      double largest = 0;
      for (double& e : x) largest = std::max(largest, std::abs(e *= times));
      expect(agrees(what, got, rows, x, s.batch, tokens, heads, dim, l2, 3 * l2 * largest + 1e-6));
    };
    one("dq", dq, in.q_rows(dq.data(), s.qk_dim), q64, s.q_tokens, s.q_heads, s.qk_dim);
    one("dk", dk, in.k_rows(dk.data(), s.qk_dim), k64, s.k_tokens, s.kv_heads, s.qk_dim);
    one("dv", dv, in.k_rows(dv.data(), s.v_dim), v64, s.k_tokens, s.kv_heads, s.v_dim);
  }

  const Inputs<T>& in;
  Array<T> dout;
  Array<float> lse, delta, dq, dk, dv;
  Array<unsigned> workspace;
};

/// Rows [batch, tokens, heads, dim] outside of [begin, end) become NaN.
template <class T>
void poison_outside(const HeadRows<T>& rows, const Shape& s, std::int64_t tokens, int heads, int dim,
                    std::int64_t begin, std::int64_t end) {
  for (int b = 0; b < s.batch; ++b) {
    for (int h = 0; h < heads; ++h) {
      for (std::int64_t t = 0; t < tokens; ++t) {
        if (t >= begin && t < end) continue;
        check_cuda(cudaMemset(rows.at(b, t, h), 0xff, static_cast<std::size_t>(dim) * sizeof(T)), "cudaMemset");
      }
    }
  }
}

template <class T, class Kernel>
void test_one(const char* name, const Shape& shape, bool is_poisoned = false) {
  std::printf("%s: b%d %d/%d heads, %lldx%lld, %d/%d\n", name, shape.batch, shape.q_heads, shape.kv_heads,
              static_cast<long long>(shape.q_tokens), static_cast<long long>(shape.k_tokens), shape.qk_dim,
              shape.v_dim);
  std::fflush(stdout);
  const Inputs<T> in(shape);
  if (is_poisoned) {
    const Rectangle& r = shape.work.front();
    poison_outside(in.q_rows(in.q.data(), shape.qk_dim), shape, shape.q_tokens, shape.q_heads, shape.qk_dim, r.q0,
                   r.q1);
    poison_outside(in.k_rows(in.k.data(), shape.qk_dim), shape, shape.k_tokens, shape.kv_heads, shape.qk_dim, r.k0,
                   r.k1);
    poison_outside(in.k_rows(in.v.data(), shape.v_dim), shape, shape.k_tokens, shape.kv_heads, shape.v_dim, r.k0, r.k1);
  }
  const Run<T, Kernel> run(in);
  if (is_poisoned) {
    const Rectangle& r = shape.work.front();
    poison_outside(in.q_rows(run.dout.data(), shape.v_dim), shape, shape.q_tokens, shape.q_heads, shape.v_dim, r.q0,
                   r.q1);
  }
  std::puts(" in any order");
  run.run(false, false);
  run.compare(1);
  std::puts(" in a fixed order");
  run.run(false, true);
  run.compare(1);
  const std::vector<float> dq = run.dq.host(), dk = run.dk.host(), dv = run.dv.host();
  for (const int ctas : {1, 5, 0, 0}) {
    run.run(false, true, ctas);
    expect(same_bits("dq again", dq, run.dq.host()));
    expect(same_bits("dk again", dk, run.dk.host()));
    expect(same_bits("dv again", dv, run.dv.host()));
  }
  std::puts(" added to what is there");
  run.run(true, true);
  run.compare(2);
}

template <class T, class Kernel>
void test_kernel(const char* type, int qk, int v) {
  std::printf("--- %s %d/%d\n", type, qk, v);
  test_one<T, Kernel>("one tile", {1, 1, 1, 64, 128, qk, v, full(64, 128)});
  test_one<T, Kernel>("two tiles of queries", {1, 1, 1, 128, 128, qk, v, full(128, 128)});
  test_one<T, Kernel>("two tiles of keys", {1, 1, 1, 64, 256, qk, v, full(64, 256)});
  test_one<T, Kernel>("six by five", {1, 2, 1, 384, 640, qk, v, full(384, 640)});
  test_one<T, Kernel>("NaN around the work", {1, 4, 2, 300, 333, qk, v, {{70, 190, 100, 215, 40}}}, true);
  for (const Named& one : common_cases(qk, v, 20)) test_one<T, Kernel>(one.name, one.shape);
}

/// Equal bits of 16/2 heads, in a fixed order on a poisoned workspace, while another kernel takes multiprocessors away.
template <class T, class Kernel>
void repeat(int qk, int v) {
  const int calls = testing_support::is_quick() ? 5 : 1000;
  std::printf("--- %d calls, %d/%d\n", calls, qk, v);
  const Inputs<T> in({1, 16, 2, 300, 300, qk, v, documents({0, 20, 200, 300})});
  const Run<T, Kernel> run(in);
  run.run(false, true);
  const std::vector<float> dq = run.dq.host(), dk = run.dk.host(), dv = run.dv.host();
  const CudaStream noise;
  bool same = true;
  for (int call = 1; call < calls && same; ++call) {
    templates_testing::spin<<<1 + engine()() % 200, 64, 0, noise>>>(engine()() % 100'000);
    check_launch("spin");
    run.run(false, true, call % 3 == 0 ? 0 : 1 + static_cast<int>(engine()() % 132));
    same =
        same_bits("dq", dq, run.dq.host()) && same_bits("dk", dk, run.dk.host()) && same_bits("dv", dv, run.dv.host());
  }
  expect(same);
}
}  // namespace hopper_backward_testing

int main(int, char** arguments) {
  using namespace hopper_backward_testing;
  if (gpu_testing::lacks_hopper()) return gpu_testing::skipped;
  const unsigned seed =
      arguments[1] != nullptr ? static_cast<unsigned>(std::stoul(arguments[1])) : std::random_device{}();
  engine(seed);
  std::printf("seed %u\n", seed);
  test_kernel<bfloat16, HopperBackward<bfloat16, BackwardTiling<128, 128>>>("bf16", 128, 128);
  test_kernel<bfloat16, HopperBackward<bfloat16, BackwardTiling<64, 64>>>("bf16", 64, 64);
  test_kernel<float16, HopperBackward<float16, BackwardTiling<128, 128>>>("f16", 128, 128);
  test_kernel<bfloat16, HopperGradients<bfloat16, HeadDims<192, 128>>>("bf16", 192, 128);
  test_kernel<bfloat16, HopperGradients<bfloat16, HeadDims<256, 256>>>("bf16", 256, 256);
  test_kernel<float16, HopperGradients<float16, HeadDims<192, 128>>>("f16", 192, 128);
  test_kernel<float16, HopperGradients<float16, HeadDims<256, 256>>>("f16", 256, 256);
  repeat<bfloat16, HopperBackward<bfloat16, BackwardTiling<128, 128>>>(128, 128);
  repeat<bfloat16, HopperBackward<bfloat16, BackwardTiling<64, 64>>>(64, 64);
  std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
