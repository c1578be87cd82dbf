// moe_gemm_bench: the grouped products of the experts' leaves, one GPU, bf16: forward, both gradients, and the ones
// fused with the activation. The floor is the larger of FLOPs at the rate of a dense product and bytes at that of a
// copy.
#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <pleat/cuda/buffer.hpp>
#include <pleat/cuda/kernel.hpp>
#include <pleat/cuda/stream.hpp>
#include <pleat/moe/cuda/experts.cuh>

#include "gemm_sizes.hpp"

namespace moe_bench {

using namespace pleat;
using leaf = moe::detail::CudaExpertLeaf;

constexpr double dense_flops_per_us = 783e6;  // bf16, 8192 x 8192 x 8192
constexpr double copy_bytes_per_us = 4153e3;  // read and written

PLEAT_KERNEL void normal_kernel(bfloat16* out, std::size_t elems, float scale, unsigned seed) {
  const std::size_t step = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  for (std::size_t i = blockIdx.x * static_cast<std::size_t>(blockDim.x) + threadIdx.x; i < elems; i += step) {
    std::uint64_t x = (i + 1) * 0x9E3779B97F4A7C15ull + seed * 0xD1B54A32D192ED03ull;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ x >> 27) * 0x94D049BB133111EBull;
    x ^= x >> 31;
    const float radius = sqrtf(-2 * logf((static_cast<float>(x & 0xffffffffu) + 1) * 0x1p-32f));
    out[i] = bfloat16(scale * radius * cospif(2 * static_cast<float>(x >> 32) * 0x1p-32f));
  }
}

/// Zeros the pad rows. One CTA per row of the array.
PLEAT_KERNEL void pad_kernel(bfloat16* rows, std::int64_t columns, const std::int64_t* offsets,
                             const std::int64_t* ends, int experts) {
  const std::int64_t row = blockIdx.x;
  for (int e = 0; e < experts; ++e) {
    if (row < ends[e] || row >= offsets[e + 1]) continue;
    for (std::int64_t c = threadIdx.x; c < columns; c += blockDim.x) rows[row * columns + c] = bfloat16(0.0f);
  }
}

template <class T>
class Array {
 public:
  explicit Array(std::int64_t elems)
      : elems_(static_cast<std::size_t>(elems)), buffer_(static_cast<std::size_t>(elems) * sizeof(T)) {
    check_cuda(cudaMemset(buffer_.data(), 0xff, buffer_.size_bytes()), "cudaMemset");
  }
  T* data() const { return reinterpret_cast<T*>(buffer_.data()); }
  void upload(const std::vector<T>& values) {
    check_cuda(cudaMemcpy(data(), values.data(), buffer_.size_bytes(), cudaMemcpyDefault), "cudaMemcpy");
  }
  void draw(float scale, unsigned seed) {
    normal_kernel<<<1024, 256>>>(data(), elems_, scale, seed);
    check_launch("normal_kernel");
  }

 private:
  std::size_t elems_;
  CudaBuffer buffer_;
};

/// Microseconds of one call: the median of 9 pairs, from rested clocks.
inline double median_us(const std::function<void()>& call) {
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  std::this_thread::sleep_for(std::chrono::milliseconds(40));
  const CudaEvent begin(true), end(true);
  for (int i = 0; i < 3; ++i) call();
  std::array<double, 9> us{};
  for (double& one : us) {
    check_cuda(cudaEventRecord(begin), "cudaEventRecord");
    call();
    call();
    check_cuda(cudaEventRecord(end), "cudaEventRecord");
    check_cuda(cudaEventSynchronize(end), "cudaEventSynchronize");
    float ms = 0;
    check_cuda(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
    one = ms * 500;
  }
  std::nth_element(us.begin(), us.begin() + us.size() / 2, us.end());
  return us[us.size() / 2];
}

struct Shape {
  std::int64_t rows, k, n;
  int experts;
};

inline void run(const Shape& shape, const std::string& kind, int max_ctas) {
  const std::int64_t k = shape.k, n = shape.n, inner = n / 2, experts = shape.experts;
  const std::vector<std::int64_t> sizes = group_sizes(kind, shape.rows, shape.experts);
  std::vector<std::int64_t> starts{0}, ends;
  for (const std::int64_t size : sizes) {
    ends.push_back(starts.back() + size);
    starts.push_back(starts.back() + (size + 127) / 128 * 128);
  }
  const std::int64_t capacity = starts.back();
  Array<std::int64_t> offsets(experts + 1), row_ends(experts);
  offsets.upload(starts);
  row_ends.upload(ends);
  Array<bfloat16> x(capacity * k), dy(capacity * n), weights(experts * n * k);
  Array<bfloat16> wide(capacity * std::max(n, k)), gate(capacity * inner), up(capacity * inner), act(capacity * inner);
  Array<float> dweights(experts * n * k);
  x.draw(1, 1);
  dy.draw(1, 2);
  weights.draw(1 / std::sqrt(static_cast<float>(k)), 3);
  const auto pad = [&](const Array<bfloat16>& rows, std::int64_t columns) {
    pad_kernel<<<static_cast<unsigned>(capacity), 256>>>(rows.data(), columns, offsets.data(), row_ends.data(),
                                                         shape.experts);
    check_launch("pad_kernel");
  };
  pad(x, k);
  pad(dy, n);

  const auto plan_of = [&](std::int64_t hidden, std::int64_t inner_size) {
    return moe::plan(moe::ExpertShape{shape.experts, hidden, inner_size, capacity, DType::bf16},
                     moe::ExpertOptions{max_ctas});
  };
  const moe::ExpertPlan whole = plan_of(n, k), halves = plan_of(k, inner);
  const std::int64_t* o = offsets.data();
  const auto matrix = [&](auto* first, std::int64_t rows, std::int64_t columns) {
    return moe::expert_matrix(first, experts, rows, columns, n * k);
  };
  const TensorRef w = matrix(weights.data(), n, k), dw = matrix(dweights.data(), n, k);
  const TensorRef gate_w = matrix(weights.data(), inner, k), up_w = matrix(weights.data() + inner * k, inner, k);
  const TensorRef down_w = matrix(weights.data(), k, inner);

  const double flops = 2.0 * static_cast<double>(shape.rows * n * k);
  const double in = 2.0 * static_cast<double>(shape.rows * k), out = 2.0 * static_cast<double>(shape.rows * n);
  const double w_bytes = 2.0 * static_cast<double>(experts * n * k);
  const auto row = [&](const char* name, double work, double bytes, const std::function<void()>& call) {
    const double us = median_us(call), floor = std::max(work / dense_flops_per_us, bytes / copy_bytes_per_us);
    std::printf("%6lld %5lld %5lld %3d %-12s %-28s %8.1f %8.1f %9.1f %6.3f\n", static_cast<long long>(shape.rows),
                static_cast<long long>(k), static_cast<long long>(n), shape.experts, kind.c_str(), name, us,
                work / us * 1e-6, floor, us / floor);
    std::fflush(stdout);
  };
  row("product", flops, in + w_bytes + out, [&] { leaf::down(whole, x.data(), o, w, wide.data(), nullptr); });
  row("gate and up, activation", flops, in + w_bytes + 1.5 * out,
      [&] { leaf::gate_up(halves, x.data(), o, gate_w, up_w, gate.data(), up.data(), act.data(), nullptr); });
  row("gradient of rows, two terms", flops, out + w_bytes + in, [&] {
    leaf::gate_up_backward(halves, dy.data(), dy.data() + capacity * inner, o, gate_w, up_w, wide.data(), nullptr);
  });
  row("through down, activation", flops / 2, in + w_bytes / 2 + 2.5 * out, [&] {
    leaf::down_backward(halves, x.data(), o, down_w, dy.data(), dy.data() + capacity * inner, gate.data(), up.data(),
                        act.data(), nullptr);
  });
  const auto gradient = [&](const char* name, bool accumulate, const TensorRef& to, double result_bytes) {
    row(name, flops, in + out + (accumulate ? 2 : 1) * result_bytes,
        [&] { leaf::weight_gradient(whole, dy.data(), n, x.data(), k, o, accumulate, to, nullptr); });
  };
  gradient("gradient of weights, fp32", false, dw, 2 * w_bytes);
  gradient("gradient of weights, += fp32", true, dw, 2 * w_bytes);
  const TensorRef narrow = matrix(reinterpret_cast<bfloat16*>(dweights.data()), n, k);
  gradient("gradient of weights, bf16", false, narrow, w_bytes);
}

}  // namespace moe_bench

/// [<CTAs at most>]
int main(int argc, char** argv) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("skipped: no GPU\n");
    return 77;
  }
  try {
    std::printf("%6s %5s %5s %3s %-12s %-28s %8s %8s %9s %6s\n", "rows", "K", "N", "E", "sizes", "operation", "us",
                "TFLOP/s", "floor us", "ratio");
    for (const moe_bench::Shape& shape :
         {moe_bench::Shape{65536, 2048, 1536, 64}, moe_bench::Shape{65536, 2048, 2816, 32},
          moe_bench::Shape{32768, 7168, 4096, 32}}) {
      for (const char* kind : {"equal", "multinomial", "zipf"}) {
        moe_bench::run(shape, kind, argc > 1 ? std::atoi(argv[1]) : 0);
      }
    }
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
