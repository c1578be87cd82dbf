// Newton-Schulz on CUDA: three products an iteration through cuBLASLt, all matrices of a shape at once.
#pragma once

#include <vector>

#include <pleat/cuda/leaf.cuh>
#include <pleat/optim/cuda/strided_gemm.cuh>
#include <pleat/optim/muon_leaf.hpp>

namespace pleat::inline v0 {

namespace detail {

/// The elements of one matrix among the CTAs of a grid's row: f(i, count) as for_each_pack.
template <int Width, class F>
__device__ void for_each_matrix_pack(std::int64_t elems, F f) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * leaf_threads;
  const std::int64_t thread = blockIdx.x * static_cast<std::int64_t>(leaf_threads) + threadIdx.x;
  for (std::int64_t pack = thread; pack < elems / Width; pack += step) {
    f(pack * Width, std::integral_constant<int, Width>{});
  }
  const std::int64_t tail = elems / Width * Width + thread;
  if (tail < elems) f(tail, std::integral_constant<int, 1>{});
}

/// squares[matrix][gridDim.x]: parts of each matrix's sum of squares, in a fixed order.
template <class P, int Width>
PLEAT_KERNEL void __launch_bounds__(leaf_threads)
    matrix_squares_kernel(double* squares, const P* matrices, std::int64_t elems, std::int64_t stride) {
  const P* const matrix = matrices + blockIdx.y * stride;
  double sum = 0;
  for_each_matrix_pack<Width>(elems, [&]<int Count>(std::int64_t i, std::integral_constant<int, Count>) {
    const auto pack = *reinterpret_cast<const Pack<P, Count>*>(matrix + i);
#pragma unroll
    for (int k = 0; k < Count; ++k) sum += static_cast<double>(pack.elem[k]) * static_cast<double>(pack.elem[k]);
  });
  sum = sum_of_block(sum);
  if (threadIdx.x == 0) squares[blockIdx.y * gridDim.x + blockIdx.x] = sum;
}

/// out = in / (its norm + eps); `out` may be `in`.
template <class P, int Width>
PLEAT_KERNEL void __launch_bounds__(leaf_threads)
    normalize_kernel(P* out, const P* in, const double* squares, std::int64_t elems, std::int64_t stride, double eps) {
  using Sum = accumulator_t<P>;
  __shared__ Sum shared_inverse;
  if (threadIdx.x < 32) {
    constexpr int parts = optim::MatrixBatch::Work::square_parts;
    double sum = 0;
    for (int i = threadIdx.x; i < parts; i += 32) sum += squares[blockIdx.y * parts + i];
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_down_sync(0xffffffffu, sum, distance);
    if (threadIdx.x == 0) shared_inverse = static_cast<Sum>(1 / (sqrt(sum) + eps));
  }
  __syncthreads();
  const Sum inverse = shared_inverse;
  const std::int64_t first = blockIdx.y * stride;
  for_each_matrix_pack<Width>(elems, [&]<int Count>(std::int64_t i, std::integral_constant<int, Count>) {
    auto pack = *reinterpret_cast<const Pack<P, Count>*>(in + first + i);
#pragma unroll
    for (int k = 0; k < Count; ++k) pack.elem[k] = static_cast<P>(static_cast<Sum>(pack.elem[k]) * inverse);
    *reinterpret_cast<Pack<P, Count>*>(out + first + i) = pack;
  });
}

}  // namespace detail

/// Owns a handle of cuBLASLt. A row-major matrix is a column-major one transposed, A is symmetric, and no matrix is
/// copied to be transposed: tall ones take A = X^T X. At bind each product runs once, on the caller's stream, so that
/// its kernel is loaded. Errors: cuda_error C20.
template <>
class newton_schulz_leaf<cuda_device> {
 public:
  newton_schulz_leaf(std::span<const optim::MatrixBatch> batches, const optim::MuonOptions& options, Block work,
                     cudaStream_t s)
      : handle_(detail::make_cublaslt()), options_(options), work_(work) {
    dispatch_dtype(optim::ProductTypes{}, options.product, [&](auto product) {
      using P = typename decltype(product)::type;
      preload_kernel(detail::matrix_squares_kernel<P, detail::pack_width(sizeof(P))>, "matrix_squares_kernel");
      preload_kernel(detail::normalize_kernel<P, detail::pack_width(sizeof(P))>, "normalize_kernel");
    });
    for (const optim::MatrixBatch& batch : batches) {
      batches_.push_back(make_batch(batch));
      iterate(batches_.back(), batch.data, work_of(batch).other, s);
    }
  }

  void run(std::size_t index, cudaStream_t s) const {
    const Batch& batch = batches_[index];
    const optim::MatrixBatch::Work work = work_of(batch.matrices);
    void* from = options_.iterations % 2 == 0 ? batch.matrices.data : work.other;
    void* to = options_.iterations % 2 == 0 ? work.other : batch.matrices.data;
    normalize(batch.matrices, from, work.squares, s);
    for (int step = 0; step < options_.iterations; ++step, std::swap(from, to)) iterate(batch, from, to, s);
  }

 private:
  struct Batch {
    optim::MatrixBatch matrices;
    detail::StridedGemm gram, poly, next;
  };

  optim::MatrixBatch::Work work_of(const optim::MatrixBatch& batch) const {
    Carver memory(work_);
    return batch.carve(memory, options_.product);
  }

  Batch make_batch(const optim::MatrixBatch& batch) const {
    const std::int64_t n = batch.order();
    const bool is_wide = batch.rows <= batch.cols;
    const detail::MatrixPlaces x{batch.cols, batch.rows, batch.stride_elems()}, a{n, n, batch.gram_stride_elems()};
    const auto product = [&](cublasOperation_t op_left, cublasOperation_t op_right, const detail::MatrixPlaces& left,
                             const detail::MatrixPlaces& right, const detail::MatrixPlaces& out) {
      return detail::StridedGemm(handle_.get(), options_.product, op_left, op_right, left, right, out, batch.count);
    };
    return {batch, is_wide ? product(CUBLAS_OP_T, CUBLAS_OP_N, x, x, a) : product(CUBLAS_OP_N, CUBLAS_OP_T, x, x, a),
            product(CUBLAS_OP_N, CUBLAS_OP_N, a, a, a),
            is_wide ? product(CUBLAS_OP_N, CUBLAS_OP_N, x, a, x) : product(CUBLAS_OP_N, CUBLAS_OP_N, a, x, x)};
  }

  void normalize(const optim::MatrixBatch& batch, void* out, double* squares, cudaStream_t s) const {
    dispatch_dtype(optim::ProductTypes{}, options_.product, [&](auto product) {
      using P = typename decltype(product)::type;
      constexpr int width = detail::pack_width(sizeof(P));
      const auto* const in = static_cast<const P*>(batch.data);
      const std::int64_t elems = batch.rows * batch.cols;
      const dim3 grid(optim::MatrixBatch::Work::square_parts, static_cast<unsigned>(batch.count));
      detail::matrix_squares_kernel<P, width>
          <<<grid, detail::leaf_threads, 0, s>>>(squares, in, elems, batch.stride_elems());
      check_launch("matrix_squares_kernel");
      detail::normalize_kernel<P, width><<<grid, detail::leaf_threads, 0, s>>>(static_cast<P*>(out), in, squares, elems,
                                                                               batch.stride_elems(), options_.eps);
      check_launch("normalize_kernel");
    });
  }

  void iterate(const Batch& batch, const void* x, void* out, cudaStream_t s) const {
    using optim::NewtonSchulz;
    const optim::MatrixBatch::Work work = work_of(batch.matrices);
    const bool is_wide = batch.matrices.rows <= batch.matrices.cols;
    batch.gram.run(1, x, x, 0, nullptr, work.gram, s);
    batch.poly.run(NewtonSchulz::c, work.gram, work.gram, NewtonSchulz::b, work.gram, work.poly, s);
    batch.next.run(1, is_wide ? x : work.poly, is_wide ? work.poly : x, NewtonSchulz::a, x, out, s);
  }

  detail::CublasLtOwned<cublasLtHandle_t> handle_;
  optim::MuonOptions options_;
  Block work_;
  std::vector<Batch> batches_;
};

}  // namespace pleat::inline v0
