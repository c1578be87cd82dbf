// A CUDA executor with kernels that dawdle in front of its work, so that streams and ranks meet in many orders.
#pragma once

#include <memory>
#include <random>

#include <pleat/cuda/executor.hpp>
#include <pleat/cuda/kernel.hpp>

namespace templates_testing {

PLEAT_KERNEL void spin(std::uint64_t nanoseconds) {
  const auto now = [] {
    std::uint64_t time;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
    return time;
  };
  for (const std::uint64_t begin = now(); now() - begin < nanoseconds;) {
  }
}

/// Delays one stream, or each: no result may depend on it.
class DelayingExecutor : public pleat::CudaExecutor {
 public:
  DelayingExecutor() = default;  // without delays
  /// `only`: the stream that is late; null: each of them.
  DelayingExecutor(unsigned seed, cudaStream_t only) : random_(std::make_shared<std::mt19937>(seed)), only_(only) {}

  /// Work that the caller puts on `s` itself comes late too.
  void delay(cudaStream_t s) const {
    if (random_ == nullptr || (only_ != nullptr && s != only_)) return;
    const auto draw = (*random_)();
    if (draw % 4 != 0) return;
    spin<<<1, 1, 0, s>>>(draw / 4 % 150'000);
    pleat::check_launch("spin");
  }
  void record(const pleat::CudaEvent& event, cudaStream_t s) const {
    delay(s);
    CudaExecutor::record(event, s);
  }
  void wait(cudaStream_t s, const pleat::CudaEvent& event) const {
    CudaExecutor::wait(s, event);
    delay(s);
  }
  void copy(void* out, const void* in, std::size_t bytes, cudaStream_t s) const {
    delay(s);
    CudaExecutor::copy(out, in, bytes, s);
  }
  void copy_2d(void* out, std::size_t out_pitch, const void* in, std::size_t in_pitch, std::size_t width,
               std::size_t height, cudaStream_t s) const {
    delay(s);
    CudaExecutor::copy_2d(out, out_pitch, in, in_pitch, width, height, s);
  }
  void zero(void* out, std::size_t bytes, cudaStream_t s) const {
    delay(s);
    CudaExecutor::zero(out, bytes, s);
  }

 private:
  std::shared_ptr<std::mt19937> random_;
  cudaStream_t only_ = nullptr;
};
static_assert(pleat::executor<DelayingExecutor>);

}  // namespace templates_testing
