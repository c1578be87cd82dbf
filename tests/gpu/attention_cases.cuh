// Calls of attention kernels on random data: shapes and work that a test or a benchmark wants, and how results compare.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include <pleat/cuda/buffer.hpp>

#include <support/copy_now.hpp>

#include "reference_attention.cuh"

namespace attention_cases {

using namespace pleat;
using namespace pleat::attention_kernel;

/// What one call computes. `spread`: the standard deviation of queries, large for a large LSE.
struct Shape {
  int batch, q_heads, kv_heads;
  std::int64_t q_tokens, k_tokens;
  int qk_dim, v_dim;
  std::vector<Rectangle> work;
  float spread = 1;
  bool heads_first = false;  // memory [batch, heads, tokens, dim]; otherwise tokens stand before heads
};

inline std::vector<Rectangle> causal(std::int64_t tokens) {
  return {{0, tokens, 0, tokens, 0}};
}
inline std::vector<Rectangle> full(std::int64_t queries, std::int64_t keys) {
  return {{0, queries, 0, keys}};
}
/// Causal documents one after another, some of them empty.
inline std::vector<Rectangle> documents(std::vector<std::int64_t> ends) {
  std::vector<Rectangle> work;
  std::int64_t begin = 0;
  for (const std::int64_t end : ends) {
    if (end > begin) work.push_back({begin, end, begin, end, 0});
    begin = end;
  }
  return work;
}

struct Named {
  const char* name;
  Shape shape;
};
/// Shapes that every kernel computes: odd sizes, groups of heads, documents, rows without keys, a large LSE.
inline std::vector<Named> common_cases(int qk, int v, float large_spread) {
  std::vector<Rectangle> many;
  for (std::int64_t i = 0; i < 100; ++i) many.push_back({i * 9, i * 9 + 9, i * 9, i * 9 + 9, 0});
  return {
      {"causal", {1, 2, 2, 512, 512, qk, v, causal(512)}},
      {"causal, odd, grouped", {2, 6, 2, 777, 777, qk, v, causal(777)}},
      {"full, odd, heads first", {1, 3, 3, 300, 461, qk, v, full(300, 461), 1, true}},
      {"documents", {1, 4, 2, 900, 900, qk, v, documents({0, 5, 5, 130, 131, 400, 777, 777})}},
      {"100 documents", {1, 1, 1, 900, 900, qk, v, many}},
      {"last diagonal", {1, 2, 1, 100, 350, qk, v, {{0, 100, 0, 350, 250}}}},
      {"rows without keys", {1, 2, 1, 350, 100, qk, v, {{0, 350, 0, 100, -250}}}},
      {"two rectangles of the same queries", {1, 2, 1, 200, 300, qk, v, {{0, 200, 0, 90}, {0, 200, 200, 290, 10}}}},
      {"no work", {1, 2, 1, 200, 300, qk, v, {}}},
      {"large scores", {1, 2, 1, 400, 400, qk, v, causal(400), large_spread}},
  };
}

inline std::mt19937& engine(unsigned seed = 0) {
  static std::mt19937 e{std::random_device{}()};
  if (seed != 0) e.seed(seed);
  return e;
}

/// Device memory of `T`.
template <class T>
class Array {
 public:
  Array() = default;
  explicit Array(std::size_t count) : count_(count), memory_(std::max<std::size_t>(count, 1) * sizeof(T)) {}
  explicit Array(const std::vector<T>& values) : Array(values.size()) {
    testing_support::copy_now(data(), values.data(), values.size() * sizeof(T));
  }
  T* data() const { return reinterpret_cast<T*>(memory_.data()); }
  std::size_t count() const { return count_; }
  /// All bytes 0xff: NaN of every type.
  void poison() const { check_cuda(cudaMemset(data(), 0xff, count_ * sizeof(T)), "poison"); }
  void zero() const { check_cuda(cudaMemset(data(), 0, count_ * sizeof(T)), "zero"); }
  std::vector<T> host() const {
    std::vector<T> values(count_);
    testing_support::copy_now(values.data(), data(), count_ * sizeof(T));
    return values;
  }

 private:
  std::size_t count_ = 0;
  CudaBuffer memory_;
};

template <class T>
PLEAT_KERNEL void fill_normal(T* x, std::size_t count, unsigned long long seed, float spread) {
  for (std::size_t i = blockIdx.x * static_cast<std::size_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<std::size_t>(gridDim.x) * blockDim.x) {
    unsigned long long z = seed + (i + 1) * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    z ^= z >> 31;
    const float u = (static_cast<float>(z >> 40) + 0.5f) * 0x1p-24f, w = static_cast<float>(z & 0xffffff) * 0x1p-24f;
    x[i] = static_cast<T>(spread * sqrtf(-2 * logf(u)) * cospif(2 * w));
  }
}

template <class T>
Array<T> normal(std::size_t count, float spread = 1) {
  Array<T> a(count);
  fill_normal<<<1024, 256>>>(a.data(), count, (static_cast<unsigned long long>(engine()()) << 32) + engine()(), spread);
  check_launch("fill_normal");
  return a;
}

template <class T>
HeadRows<T> rows(T* data, std::int64_t tokens, int heads, int dim, bool heads_first) {
  if (heads_first) return {data, heads * tokens * dim, dim, tokens * dim};
  return {data, heads * tokens * dim, static_cast<std::int64_t>(heads) * dim, dim};
}
inline RowStatistics statistics(float* data, std::int64_t tokens, int heads) {
  return {data, heads * tokens, tokens, 1};
}

template <class T>
struct Inputs {
  explicit Inputs(const Shape& shape)
      : s(shape),
        q(normal<T>(s.batch * s.q_tokens * s.q_heads * s.qk_dim, s.spread)),
        k(normal<T>(s.batch * s.k_tokens * s.kv_heads * s.qk_dim)),
        v(normal<T>(s.batch * s.k_tokens * s.kv_heads * s.v_dim)),
        work(s.work) {}

  Extents extents() const { return {s.batch, s.q_heads, s.kv_heads, s.q_tokens, s.k_tokens, s.qk_dim, s.v_dim}; }
  float scale() const { return 1 / std::sqrt(static_cast<float>(s.qk_dim)); }
  WorkList list() const { return {work.data(), static_cast<int>(s.work.size())}; }
  template <class X>
  HeadRows<X> q_rows(X* data, int dim) const {
    return rows(data, s.q_tokens, s.q_heads, dim, s.heads_first);
  }
  template <class X>
  HeadRows<X> k_rows(X* data, int dim) const {
    return rows(data, s.k_tokens, s.kv_heads, dim, s.heads_first);
  }

  Forward<T> forward(float* o_acc, float* lse, T* out, bool first, bool last) const {
    return {extents(),
            q_rows<const T>(q.data(), s.qk_dim),
            k_rows<const T>(k.data(), s.qk_dim),
            k_rows<const T>(v.data(), s.v_dim),
            list(),
            scale(),
            q_rows(o_acc, s.v_dim),
            statistics(lse, s.q_tokens, s.q_heads),
            q_rows(out, s.v_dim),
            first,
            last,
            {}};
  }
  Backward<T> backward(const T* dout, float* lse, float* delta, float* dq, float* dk, float* dv, bool accumulate,
                       bool deterministic) const {
    return {extents(),
            q_rows<const T>(q.data(), s.qk_dim),
            k_rows<const T>(k.data(), s.qk_dim),
            k_rows<const T>(v.data(), s.v_dim),
            q_rows<const T>(dout, s.v_dim),
            statistics(lse, s.q_tokens, s.q_heads),
            statistics(delta, s.q_tokens, s.q_heads),
            list(),
            scale(),
            q_rows(dq, s.qk_dim),
            k_rows(dk, s.qk_dim),
            k_rows(dv, s.v_dim),
            accumulate,
            accumulate,
            accumulate,
            deterministic,
            0};
  }
  std::size_t q_rows_count() const { return static_cast<std::size_t>(s.batch * s.q_tokens * s.q_heads); }
  std::size_t k_rows_count() const { return static_cast<std::size_t>(s.batch * s.k_tokens * s.kv_heads); }

  Shape s;
  Array<T> q, k, v;
  Array<Rectangle> work;
};

/// Element [b, token, head, d] of what `rows` describes, from a host copy of its memory.
template <class T>
double element(const std::vector<T>& host, const HeadRows<T>& r, std::int64_t b, std::int64_t t, std::int64_t h,
               int d) {
  return static_cast<double>(static_cast<float>(host[static_cast<std::size_t>(r.at(b, t, h) + d - r.data)]));
}

/// Compares [batch, tokens, heads, dim] with float64, dense; false and a line that finds the fault when too far off.
template <class T>
bool agrees(const std::string& what, const Array<T>& got, const HeadRows<T>& r, const std::vector<double>& expected,
            int batch, std::int64_t tokens, int heads, int dim, double most_l2, double most_off) {
  const std::vector<T> host = got.host();
  double off2 = 0, all2 = 0, largest = 0;
  std::size_t wrong = 0;
  std::string first;
  std::size_t i = 0;
  for (int b = 0; b < batch; ++b) {
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (int h = 0; h < heads; ++h) {
        for (int d = 0; d < dim; ++d, ++i) {
          const double x = element(host, r, b, t, h, d), off = std::abs(x - expected[i]);
          all2 += expected[i] * expected[i];
          off2 += off * off;
          largest = std::max(largest, off);
          if (!(off <= most_off)) {
            if (wrong++ == 0) {
              char text[160];
              std::snprintf(text, sizeof text, "[b%d t%lld h%d d%d] expected %.6g got %.6g", b,
                            static_cast<long long>(t), h, d, expected[i], x);
              first = text;
            }
          }
        }
      }
    }
  }
  const double l2 = std::sqrt(off2) / std::max(std::sqrt(all2), 1e-30);
  const bool good = wrong == 0 && (l2 <= most_l2 || all2 == 0);
  std::printf("  %s %-24s l2 %.2e max %.2e%s%s\n", good ? "ok    " : "FAILED", what.c_str(), l2, largest,
              wrong != 0 ? (" wrong " + std::to_string(wrong) + " of " + std::to_string(i) + ", first ").c_str() : "",
              first.c_str());
  return good;
}

template <class T>
bool same_bits(const std::string& what, const std::vector<T>& a, const std::vector<T>& b) {
  if (std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0) return true;
  std::size_t i = 0;
  while (std::memcmp(&a[i], &b[i], sizeof(T)) == 0) ++i;
  std::printf("  FAILED %s: bits differ, first at %zu of %zu: %g and %g\n", what.c_str(), i, a.size(),
              static_cast<double>(static_cast<float>(a[i])), static_cast<double>(static_cast<float>(b[i])));
  return false;
}

/// lse and delta of float64 results, dense, as kernels get them.
template <class T>
PLEAT_KERNEL void round_statistics(Backward<T> a, const double* o, const double* lse) {
  const Extents& e = a.extents;
  for (std::int64_t row = blockIdx.x; row < e.batch * e.q_tokens * e.q_heads; row += gridDim.x) {
    const std::int64_t h = row % e.q_heads, q = row / e.q_heads % e.q_tokens, b = row / e.q_heads / e.q_tokens;
    double delta = 0;
    for (int d = 0; d < e.v_dim; ++d) delta += o[row * e.v_dim + d] * static_cast<double>(a.dout.at(b, q, h)[d]);
    a.lse.at(b, q, h) = static_cast<float>(lse[row]);
    a.delta.at(b, q, h) = static_cast<float>(delta);
  }
}

}  // namespace attention_cases
