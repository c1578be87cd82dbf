// Newton-Schulz on the host, matrix after matrix.
#pragma once

#include <cmath>
#include <vector>

#include <pleat/core/host/executor.hpp>
#include <pleat/core/host/gemm.hpp>
#include <pleat/optim/muon_leaf.hpp>

namespace pleat::inline v0 {

template <>
class newton_schulz_leaf<host_device> {
 public:
  newton_schulz_leaf(std::span<const optim::MatrixBatch> batches, const optim::MuonOptions& options, Block work,
                     HostStream)
      : batches_(batches.begin(), batches.end()), options_(options), work_(work) {}

  void run(std::size_t index, HostStream) const {
    dispatch_dtype(optim::ProductTypes{}, options_.product, [&](auto product) {
      using P = typename decltype(product)::type;
      const optim::MatrixBatch& batch = batches_[index];
      Carver memory(work_);
      const optim::MatrixBatch::Work work = batch.carve(memory, options_.product);
      for (std::int64_t i = 0; i < batch.count; ++i) {
        orthogonalize(static_cast<P*>(batch.data) + i * batch.stride_elems(), reinterpret_cast<P*>(work.other),
                      reinterpret_cast<P*>(work.gram), reinterpret_cast<P*>(work.poly), batch.rows, batch.cols);
      }
    });
  }

 private:
  template <class P>
  void orthogonalize(P* x, P* y, P* gram, P* poly, std::int64_t rows, std::int64_t cols) const {
    using Sum = gemm_sum_t<P, P, P>;
    constexpr auto a = static_cast<Sum>(optim::NewtonSchulz::a), b = static_cast<Sum>(optim::NewtonSchulz::b),
                   c = static_cast<Sum>(optim::NewtonSchulz::c);
    const std::int64_t n = rows < cols ? rows : cols;
    double squares = 0;
    for (std::int64_t i = 0; i < rows * cols; ++i) squares += static_cast<double>(x[i]) * static_cast<double>(x[i]);
    const double inverse = 1 / (std::sqrt(squares) + options_.eps);
    for (std::int64_t i = 0; i < rows * cols; ++i) x[i] = static_cast<P>(static_cast<double>(x[i]) * inverse);
    P* const result = x;
    for (int step = 0; step < options_.iterations; ++step, std::swap(x, y)) {
      std::copy_n(x, rows * cols, y);
      if (rows <= cols) {
        gemm(Op::none, Op::transpose, n, n, cols, 1, x, cols, x, cols, 0, gram, n);
      } else {
        gemm(Op::transpose, Op::none, n, n, rows, 1, x, cols, x, cols, 0, gram, n);
      }
      std::copy_n(gram, n * n, poly);
      gemm(Op::none, Op::none, n, n, n, c, gram, n, gram, n, b, poly, n);
      if (rows <= cols) {
        gemm(Op::none, Op::none, rows, cols, n, 1, poly, n, x, cols, a, y, cols);
      } else {
        gemm(Op::none, Op::none, rows, cols, n, 1, x, cols, poly, n, a, y, cols);
      }
    }
    if (x != result) std::copy_n(x, rows * cols, result);
  }

  std::vector<optim::MatrixBatch> batches_;
  optim::MuonOptions options_;
  Block work_;
};

}  // namespace pleat::inline v0
