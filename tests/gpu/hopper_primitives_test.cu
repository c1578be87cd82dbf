// The building blocks of Hopper kernels alone: every shape and operand layout of wgmma on tiles that the copy engine
// loads, and its loads, stores and adds at the edges of a tensor. Integers, so that results are exact.
#include <cstdio>
#include <random>
#include <vector>

#include <pleat/cuda/buffer.hpp>
#include <pleat/cuda/hopper/tma.cuh>
#include <pleat/cuda/hopper/wgmma.cuh>
#include <pleat/cuda/kernel.hpp>

#include <support/copy_now.hpp>

#include "skip.hpp"

namespace hopper_testing {
using namespace pleat;
using hopper::Major;

constexpr int depth = 128, a_rows = 128, a_begin = 64;  // D = A[64..127, :] B, both 128 deep
PLEAT_HD constexpr int padded(int n) {
  return (n + 63) / 64 * 64;
}

template <class T, int N, bool ARegisters, Major MajorA, Major MajorB>
PLEAT_KERNEL void __launch_bounds__(128) product(const __grid_constant__ CUtensorMap a_map,
                                                 const __grid_constant__ CUtensorMap b_map, const T* a, float* d) {
  if constexpr (hopper::is_target) {
    extern __shared__ __align__(1024) std::byte shared[];
    __shared__ hopper::Barrier done;
    constexpr int b_elements = depth * padded(N);
    T* const a_tile = reinterpret_cast<T*>(shared);
    T* const b_tile = a_tile + a_rows * depth;
    if (threadIdx.x == 0) {
      done.init(1);
      hopper::fence_barrier_init();
      done.arrive_expecting(sizeof(T) * (a_rows * depth + (MajorB == Major::k ? depth * N : b_elements)));
      for (int panel = 0; panel < 2; ++panel) {
        hopper::load(a_tile + panel * 64 * (MajorA == Major::k ? a_rows : depth), a_map, done, panel * 64, 0);
      }
      for (int panel = 0; panel < (MajorB == Major::k ? depth : padded(N)) / 64; ++panel) {
        hopper::load(b_tile + panel * 64 * (MajorB == Major::k ? N : depth), b_map, done, panel * 64, 0);
      }
    }
    __syncthreads();
    done.wait(0);
    const hopper::Tile<MajorA == Major::k ? a_rows : depth, MajorA> at(a_tile);
    const hopper::Tile<MajorB == Major::k ? N : depth, MajorB> bt(b_tile);
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    float sums[N / 2];
    for (float& x : sums) x = 1e30f;  // overwritten by the first product
    std::uint32_t registers[depth / 16][4];
    for (int k = 0; k < depth; k += 16) {
      for (int i = 0; i < 4; ++i) {  // only K-major A is read here
        registers[k / 16][i] =
            *reinterpret_cast<const std::uint32_t*>(a + (a_begin + row + i % 2 * 8) * depth + k + column + i / 2 * 8);
      }
    }
    hopper::pin(sums);
    hopper::fence();
#pragma unroll
    for (int k = 0; k < depth; k += 16) {
      if constexpr (ARegisters) {
        hopper::wgmma<T, MajorB>(sums, registers[k / 16], bt.k(k), k != 0);
      } else {
        hopper::wgmma<T, MajorA, MajorB>(sums, at.at(a_begin, k), bt.k(k), k != 0);
      }
    }
    hopper::commit();
    hopper::wait<0>();
    hopper::pin(sums);
    for (int j = 0; j < N / 8; ++j) {
      for (int i = 0; i < 4; ++i) d[(row + i / 2 * 8) * N + j * 8 + column + i % 2] = sums[4 * j + i];
    }
  }
}

int failures = 0;
std::mt19937 random_engine{std::random_device{}()};

template <class T>
std::vector<T> integers(std::size_t n) {
  std::vector<T> values(n);
  for (T& x : values) x = T(static_cast<float>(static_cast<int>(random_engine() % 9) - 4));
  return values;
}
template <class T>
T* upload(CudaBuffer& buffer, const std::vector<T>& values) {
  buffer = CudaBuffer(values.size() * sizeof(T));
  testing_support::copy_now(buffer.data(), values.data(), values.size() * sizeof(T));
  return reinterpret_cast<T*>(buffer.data());
}
template <class T>
std::vector<T> download(const T* from, std::size_t n) {
  std::vector<T> values(n);
  testing_support::copy_now(values.data(), from, n * sizeof(T));
  return values;
}
void report(const char* what, const std::vector<float>& expected, const std::vector<float>& got) {
  std::size_t wrong = 0, first = 0;
  for (std::size_t i = expected.size(); i-- > 0;) {
    if (!(expected[i] == got[i])) ++wrong, first = i;
  }
  if (wrong != 0) {
    ++failures;
    std::printf("FAILED %s: %zu of %zu wrong, first at %zu: expected %g, got %g; then", what, wrong, expected.size(),
                first, expected[first], got[first]);
    for (std::size_t i = first; i < expected.size() && i < first + 10; ++i) std::printf(" %g/%g", expected[i], got[i]);
    std::printf("\n");
  } else {
    std::printf("ok %s\n", what);
  }
}

/// Stored [mn][k] when K-major, [k][mn padded to 64] otherwise.
std::size_t index_of(Major major, int mn, int k, int mn_extent) {
  return static_cast<std::size_t>(major == Major::k ? mn * depth + k : k * padded(mn_extent) + mn);
}

template <class T, int N, bool ARegisters, Major MajorA, Major MajorB>
void test_product(const char* type) {
  const std::vector<T> a = integers<T>(a_rows * depth), b = integers<T>(depth * padded(N));
  std::vector<float> expected(64 * N);
  for (int m = 0; m < 64; ++m) {
    for (int n = 0; n < N; ++n) {
      for (int k = 0; k < depth; ++k) {
        expected[m * N + n] += static_cast<float>(a[index_of(MajorA, a_begin + m, k, a_rows)]) *
                               static_cast<float>(b[index_of(MajorB, n, k, N)]);
      }
    }
  }
  CudaBuffer a_memory, b_memory, d_memory;
  const T* const a_data = upload(a_memory, a);
  const T* const b_data = upload(b_memory, b);
  float* const d = upload(d_memory, std::vector<float>(64 * N, NAN));
  const auto map = [](const T* data, Major major, int mn) {
    const std::int64_t columns = major == Major::k ? depth : padded(mn);
    const int rows = major == Major::k ? mn : depth;
    const hopper::TensorBoxes<2> boxes{{columns, rows}, {columns * 2}, {64, rows}};
    if (!hopper::is_mappable(data, boxes)) ++failures;
    return hopper::tensor_map(data, boxes, hopper::Swizzle::b128);
  };
  constexpr auto kernel = product<T, N, ARegisters, MajorA, MajorB>;
  const int bytes = static_cast<int>(sizeof(T)) * (a_rows * depth + depth * padded(N)) + 1024;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "attribute");
  kernel<<<1, 128, bytes>>>(map(a_data, MajorA, a_rows), map(b_data, MajorB, N), a_data, d);
  check_launch("product");
  check_cuda(cudaDeviceSynchronize(), "product");
  char what[96];
  std::snprintf(what, sizeof what, "wgmma %s n%d A %s B %s", type, N,
                ARegisters ? "registers" : (MajorA == Major::k ? "k" : "mn"), MajorB == Major::k ? "k" : "mn");
  report(what, expected, download(d, expected.size()));
}
template <class T, int N>
void test_products(const char* type) {
  test_product<T, N, true, Major::k, Major::k>(type);
  test_product<T, N, true, Major::k, Major::mn>(type);
  test_product<T, N, false, Major::k, Major::k>(type);
  test_product<T, N, false, Major::k, Major::mn>(type);
  test_product<T, N, false, Major::mn, Major::mn>(type);
}

constexpr int box_columns = 32, box_rows = 16;  // one swizzled row of floats

/// Loads a box that hangs over the edge, dumps it as it lies, stores and adds it elsewhere.
PLEAT_KERNEL void copies(const __grid_constant__ CUtensorMap in, const __grid_constant__ CUtensorMap stored,
                         const __grid_constant__ CUtensorMap added, float* dump, float* rows) {
  if constexpr (hopper::is_target) {
    __shared__ __align__(1024) float box[box_rows * box_columns];
    __shared__ hopper::Barrier done;
    if (threadIdx.x == 0) {
      hopper::prefetch(in);
      done.init(1);
      hopper::fence_barrier_init();
      done.arrive_expecting(sizeof box);
      hopper::load(box, in, done, 8, 5, 1, 1);
      done.wait(0);
      hopper::store(stored, box, 8, 5, 1, 1);
      hopper::add(added, box, 8, 5, 1, 1);
      hopper::commit_stores();
      hopper::wait_stores_read<0>();
      hopper::add_floats(rows, box, sizeof box);
      hopper::add_floats(rows, box, sizeof box);
      hopper::commit_stores();
      hopper::wait_stores<0>();
    }
    __syncthreads();
    for (int i = threadIdx.x; i < box_rows * box_columns; i += blockDim.x) dump[i] = box[i];
  }
}

void test_copies() {
  constexpr int columns = 32, rows = 12, heads = 2, batch = 2;  // rows 5.. of a box of 16 hang over
  constexpr std::size_t count = static_cast<std::size_t>(columns) * rows * heads * batch;
  const std::vector<float> in = integers<float>(count), before = integers<float>(count);
  CudaBuffer memory[5];
  float* const in_data = upload(memory[0], in);
  float* const stored = upload(memory[1], before);
  float* const added = upload(memory[2], before);
  float* const dump = upload(memory[3], std::vector<float>(box_rows * box_columns, NAN));
  float* const sums = upload(memory[4], std::vector<float>(box_rows * box_columns, 1.0f));
  // [batch, rows, heads, columns]: heads lie between rows, as tokens of attention do.
  const auto map = [](float* data) {
    const hopper::TensorBoxes<4> boxes{{columns, rows, heads, batch},
                                       {columns * heads * 4, columns * 4, columns * heads * rows * 4},
                                       {box_columns, box_rows, 1, 1}};
    if (!hopper::is_mappable(data, boxes)) ++failures;
    return hopper::tensor_map(data, boxes, hopper::Swizzle::b128);
  };
  copies<<<1, 32>>>(map(in_data), map(stored), map(added), dump, sums);
  check_launch("copies");
  check_cuda(cudaDeviceSynchronize(), "copies");
  std::vector<float> box(box_rows * box_columns), expected_sums(box.size()), expected_stored = before,
                                                                             expected_added = before;
  for (int r = 0; r < box_rows; ++r) {
    for (int c = 0; c < box_columns; ++c) {
      const int row = 5 + r, column = 8 + c;
      const bool inside = row < rows && column < columns;
      const std::size_t at = ((static_cast<std::size_t>(rows) + row) * heads + 1) * columns + column;
      const float value = inside ? in[at] : 0;
      box[r * box_columns + ((c / 4) ^ (r % 8)) * 4 + c % 4] = value;
      if (!inside) continue;
      expected_stored[at] = value;
      expected_added[at] += value;
    }
  }
  for (std::size_t i = 0; i < box.size(); ++i) expected_sums[i] = 1 + 2 * box[i];
  report("load, swizzled", box, download(dump, box.size()));
  report("store", expected_stored, download(stored, count));
  report("add", expected_added, download(added, count));
  report("add_floats", expected_sums, download(sums, box.size()));
}
}  // namespace hopper_testing

int main() {
  using namespace hopper_testing;
  if (gpu_testing::lacks_hopper()) return gpu_testing::skipped;
  test_copies();
  test_products<bfloat16, 64>("bf16");
  test_products<bfloat16, 80>("bf16");
  test_products<bfloat16, 96>("bf16");
  test_products<bfloat16, 128>("bf16");
  test_products<bfloat16, 176>("bf16");
  test_products<bfloat16, 192>("bf16");
  test_products<bfloat16, 256>("bf16");
  test_products<float16, 64>("f16");
  test_products<float16, 128>("f16");
  std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}
