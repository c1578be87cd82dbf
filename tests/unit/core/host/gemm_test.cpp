// The host's matrix product against a plain triple loop: every operand layout, odd sizes, edges and storage types.
#include <pleat/core/host/gemm.hpp>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include <doctest/doctest.h>

namespace {

using pleat::bfloat16;
using pleat::Op;

struct Size {
  std::int64_t m, n, k;
};

template <class T>
std::vector<T> random_values(std::size_t count, std::mt19937_64& random) {
  std::normal_distribution<double> normal;
  std::vector<T> values(count);
  for (T& value : values) value = static_cast<T>(static_cast<float>(normal(random)));
  return values;
}

/// Compares with the triple loop in float64; leading dimensions have `gap` elements more, which must stay untouched.
template <class A, class B, class C>
void check(Op op_a, Op op_b, Size size, double alpha, double beta, std::int64_t gap, double tolerance) {
  CAPTURE(size.m);
  CAPTURE(size.n);
  CAPTURE(size.k);
  std::mt19937_64 random(static_cast<std::uint64_t>(size.m * 10007 + size.n * 101 + size.k));
  const std::int64_t lda = (op_a == Op::none ? size.k : size.m) + gap;
  const std::int64_t ldb = (op_b == Op::none ? size.n : size.k) + gap;
  const std::int64_t ldc = size.n + gap;
  const auto a = random_values<A>(static_cast<std::size_t>((op_a == Op::none ? size.m : size.k) * lda), random);
  const auto b = random_values<B>(static_cast<std::size_t>((op_b == Op::none ? size.k : size.n) * ldb), random);
  auto c = random_values<C>(static_cast<std::size_t>(size.m * ldc), random);
  const auto before = c;
  if (beta == 0) {
    for (std::int64_t i = 0; i < size.m; ++i) {
      for (std::int64_t j = 0; j < size.n; ++j)
        c[static_cast<std::size_t>(i * ldc + j)] = static_cast<C>(std::numeric_limits<float>::quiet_NaN());
    }
  }
  using Sum = pleat::gemm_sum_t<A, B, C>;
  pleat::gemm(op_a, op_b, size.m, size.n, size.k, static_cast<Sum>(alpha), a.data(), lda, b.data(), ldb,
              static_cast<Sum>(beta), c.data(), ldc);

  double error = 0, norm = 0;
  for (std::int64_t i = 0; i < size.m; ++i) {
    for (std::int64_t j = 0; j < ldc; ++j) {
      const auto at = static_cast<std::size_t>(i * ldc + j);
      if (j >= size.n) {
        CHECK(static_cast<double>(c[at]) == static_cast<double>(before[at]));
        continue;
      }
      double sum = 0;
      for (std::int64_t p = 0; p < size.k; ++p) {
        sum += static_cast<double>(a[static_cast<std::size_t>(op_a == Op::none ? i * lda + p : p * lda + i)]) *
               static_cast<double>(b[static_cast<std::size_t>(op_b == Op::none ? p * ldb + j : j * ldb + p)]);
      }
      const double expected = alpha * sum + beta * static_cast<double>(before[at]);
      const double difference = static_cast<double>(c[at]) - expected;
      REQUIRE(std::isfinite(difference));
      error += difference * difference;
      norm += expected * expected;
    }
  }
  CHECK(std::sqrt(error) <= tolerance * std::sqrt(norm));
}

TEST_CASE("gemm equals the triple loop for every layout and size") {
  const Size sizes[] = {{1, 1, 1}, {3, 5, 7}, {4, 4, 64}, {17, 33, 65}, {64, 64, 64}, {65, 63, 130}, {130, 70, 1}};
  for (const Size size : sizes) {
    for (const Op op_a : {Op::none, Op::transpose}) {
      for (const Op op_b : {Op::none, Op::transpose}) {
        check<double, double, double>(op_a, op_b, size, 1, 0, 0, 1e-14);
        check<double, double, double>(op_a, op_b, size, -0.5, 2, 3, 1e-14);
        check<float, float, float>(op_a, op_b, size, 1, 1, 2, 2e-6);
        check<bfloat16, bfloat16, float>(op_a, op_b, size, 1, 0, 1, 2e-6);
        check<bfloat16, bfloat16, bfloat16>(op_a, op_b, size, 1, 0, 0, 4e-3);
        check<float, bfloat16, float>(op_a, op_b, size, 1, 1, 0, 2e-6);
      }
    }
  }
}

TEST_CASE("gemm over an empty sum writes beta * C, and nothing where C is empty") {
  std::vector<double> c = {std::numeric_limits<double>::quiet_NaN(), 3};
  const double unused = 1;
  pleat::gemm(Op::none, Op::none, 1, 1, 0, 1, &unused, 1, &unused, 1, 0, c.data(), 1);
  pleat::gemm(Op::none, Op::none, 1, 1, 0, 1, &unused, 1, &unused, 1, 2, c.data() + 1, 1);
  CHECK(c == std::vector<double>{0, 6});
  pleat::gemm(Op::none, Op::none, 0, 1, 1, 1, &unused, 1, &unused, 1, 0, c.data(), 1);
  pleat::gemm(Op::none, Op::none, 1, 0, 1, 1, &unused, 1, &unused, 1, 0, c.data(), 1);
  CHECK(c == std::vector<double>{0, 6});
}

TEST_CASE("a row of C has the same bits wherever it stands") {
  std::mt19937_64 random(5);
  const std::int64_t m = 77, n = 40, k = 150;
  const auto a = random_values<float>(static_cast<std::size_t>(m * k), random);
  const auto b = random_values<float>(static_cast<std::size_t>(n * k), random);
  std::vector<float> all(static_cast<std::size_t>(m * n)), one(static_cast<std::size_t>(n));
  pleat::gemm(Op::none, Op::transpose, m, n, k, 1, a.data(), k, b.data(), k, 0, all.data(), n);
  for (std::int64_t i = 0; i < m; ++i) {
    pleat::gemm(Op::none, Op::transpose, 1, n, k, 1, a.data() + i * k, k, b.data(), k, 0, one.data(), n);
    CHECK(std::equal(one.begin(), one.end(), all.begin() + i * n));
  }
}

TEST_CASE("NaN in one row or column stays there, though the tiles are padded") {
  const std::int64_t m = 5, n = 6, k = 3;
  std::vector<double> a(m * k, 1), b(n * k, 1), c(m * n, 0);
  a[2 * k + 1] = std::numeric_limits<double>::quiet_NaN();
  pleat::gemm(Op::none, Op::transpose, m, n, k, 1, a.data(), k, b.data(), k, 0, c.data(), n);
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < n; ++j) CHECK(std::isnan(c[static_cast<std::size_t>(i * n + j)]) == (i == 2));
  }
}

}  // namespace
