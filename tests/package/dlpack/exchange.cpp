// What check.py calls: tensors that go out with their memory, and tensors that come in with theirs. With
// EXCHANGE_ON_CUDA they lie on a GPU and are written and read on a stream of this library, behind work that takes long.
#include <algorithm>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include <pleat/core/host/buffer.hpp>
#include <pleat/tensor/dlpack.hpp>

#include "support/dlpack.hpp"
#ifdef EXCHANGE_ON_CUDA
#include <pleat/cuda/buffer.hpp>
#include <pleat/cuda/dlpack.hpp>
#endif

namespace {
int lent = 0;
/// What a lent tensor owns; counts the tensors that consumers still have.
template <class Buffer>
struct Memory {
  explicit Memory(std::vector<Buffer> given) : buffers(std::move(given)) { ++lent; }
  Memory(Memory&& other) noexcept : buffers(std::move(other.buffers)) { ++lent; }
  ~Memory() { --lent; }
  std::vector<Buffer> buffers;
};

std::vector<float> numbers(std::int64_t rows, std::int64_t columns) {
  std::vector<float> values;
  for (std::int64_t i = 0; i < rows * columns; ++i) values.push_back(static_cast<float>(i));
  return values;
}
double sum(const pleat::TensorRef& tensor, const float* data) {
  double total = 0;
  for (std::int64_t r = 0; r < tensor.extent(0); ++r) {
    for (std::int64_t c = 0; c < tensor.extent(1); ++c) {
      total += static_cast<double>(r + 1) * static_cast<double>(data[r * tensor.stride(0) + c * tensor.stride(1)]);
    }
  }
  return total;
}
}  // namespace

extern "C" {
/// Tensors that consumers have not deleted yet.
int exchange_lent() {
  return lent;
}
/// 0, 1, 2, ... as f32 [rows, columns] on the host.
DLManagedTensor* exchange_make(std::int64_t rows, std::int64_t columns) {
  const std::vector<float> values = numbers(rows, columns);
  std::vector<pleat::HostBuffer> memory;
  auto* const data = reinterpret_cast<float*>(memory.emplace_back(values.size() * sizeof(float)).data());
  std::copy(values.begin(), values.end(), data);
  return pleat::to_dlpack<DLManagedTensor>(pleat::TensorRef(data, {rows, columns}), Memory(std::move(memory)));
}
/// The sum of f32 [rows, columns], each row times its number from 1; takes the tensor.
double exchange_sum(DLManagedTensor* given) {
  const pleat::DlOwned tensor(given);
  const pleat::TensorRef x =
      pleat::expect("x", tensor, pleat::DType::f32, pleat::DeviceKind::host, {pleat::any_extent, pleat::any_extent});
  return sum(x, x.as<float>());
}
#ifdef EXCHANGE_ON_CUDA
/// A stream of this library; the caller keeps it until the process ends.
std::int64_t exchange_stream() {
  static const pleat::CudaStream stream;
  return reinterpret_cast<std::int64_t>(static_cast<cudaStream_t>(stream));
}
/// Whether a consumer's stream number is refused as it should be.
bool exchange_refuses(std::int64_t number) {
  try {
    (void)pleat::dlpack_stream(number);
  } catch (const pleat::shape_error& e) {
    return std::string_view(e.what()).find("pleat[T08]: DLPack stream ") == 0;
  }
  return false;
}
/// As exchange_make, on the current GPU, written late on exchange_stream() for work on the consumer's stream.
DLManagedTensor* exchange_make_on_gpu(std::int64_t rows, std::int64_t columns, std::int64_t consumer) {
  const auto own = reinterpret_cast<cudaStream_t>(exchange_stream());
  const pleat::CudaExecutor executor;
  const std::vector<float> values = numbers(rows, columns);
  const std::size_t bytes = values.size() * sizeof(float);
  std::vector<pleat::CudaBuffer> memory;  // freeing any of it would wait for the device
  for (const std::size_t size : {bytes, bytes, std::size_t{1} << 30}) memory.emplace_back(size);
  executor.zero(memory[0].data(), bytes, own);
  executor.copy(memory[1].data(), values.data(), bytes, own);
  for (int i = 0; i < 100; ++i) executor.zero(memory[2].data(), memory[2].size_bytes(), own);  // some 30 ms
  executor.copy(memory[0].data(), memory[1].data(), bytes, own);
  const pleat::TensorRef tensor(reinterpret_cast<float*>(memory[0].data()), {rows, columns}, executor.device());
  return pleat::to_dlpack<DLManagedTensor>(tensor, Memory(std::move(memory)), own, consumer);
}
/// As exchange_sum, of a dense tensor on a GPU, read on exchange_stream(), which its producer has ordered after its
/// own.
double exchange_sum_on_gpu(DLManagedTensor* given) {
  const auto own = reinterpret_cast<cudaStream_t>(exchange_stream());
  const pleat::DlOwned tensor(given);
  const pleat::TensorRef x =
      pleat::expect("x", tensor, pleat::DType::f32, pleat::DeviceKind::cuda, {pleat::any_extent, pleat::any_extent});
  std::vector<float> values(static_cast<std::size_t>(x.elems()));
  pleat::CudaExecutor().copy(values.data(), x.data(), values.size() * sizeof(float), own);
  pleat::check_cuda(cudaStreamSynchronize(own), "cudaStreamSynchronize");
  return sum(x, values.data());
}
#endif
}
