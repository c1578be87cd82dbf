// The CUDA attention kernels of every dtype and all head dims on the cases of their contract. Exit code 77 without a
// GPU.
#include <cstdlib>

#include "attention_far_rows.cuh"
#include "skip.hpp"

namespace {

using namespace attention_testing;

template <class T, class Dims, template <class, class> class Kernels>
int check(const char* kernels, const char* dtype) {
  using Leaf = CudaAttention<TypeList<T>, HeadDimsList<Dims>, Kernels>;
  Leaf::preload();
  int failed = 0;
  for (const LeafCase& c : leaf_cases(Dims::qk, Dims::v)) {
    const unsigned seed = std::random_device{}();
    LeafResult r;
    try {
      r = check_leaf<T, Leaf>(c, seed);
    } catch (const std::exception& e) {
      r.failure = e.what();
    }
    const bool is_wrong = !r.failure.empty();
    failed += is_wrong;
    std::printf("%-6s %-8s %-4s %3d/%3d %-38s %.1e %.1e %.1e %.1e %.1e", is_wrong ? "FAILED" : "ok", kernels, dtype,
                Dims::qk, Dims::v, c.name.c_str(), r.out.relative_l2, r.lse.relative_l2, r.dq.relative_l2,
                r.dk.relative_l2, r.dv.relative_l2);
    if (is_wrong) std::printf(" seed %u:%s", seed, r.failure.c_str());
    std::printf("\n");
    if (cudaPeekAtLastError() != cudaSuccess && cudaDeviceSynchronize() != cudaSuccess) std::exit(1);
  }
  const struct {
    const char* name;
    Far far;
  } fars[] = {
      {"tokens far apart", Far::tokens}, {"heads far apart", Far::heads}, {"batch entries far apart", Far::batch}};
  for (const auto& f : fars) {
    std::string failure;
    try {
      failure = check_far_rows<T, Leaf>(f.far, Dims::qk, Dims::v);
    } catch (const std::exception& e) {
      failure = e.what();
    }
    failed += !failure.empty();
    std::printf("%-6s %-8s %-4s %3d/%3d %-38s %s\n", failure.empty() ? "ok" : "FAILED", kernels, dtype, Dims::qk,
                Dims::v, f.name, failure.c_str());
  }
  return failed;
}

/// The portable kernels with the tiles of a device that has less shared memory.
template <class T, class Dims>
struct PortableOfSm80 : attention_kernel::Portable<T, Dims> {
  static void backward(const attention_kernel::Backward<T>& a, const attention_kernel::Alignment& alignment,
                       cudaStream_t s) {
    attention_kernel::PortableBackward<T, Dims, attention_kernel::shared_of_sm80>::run(a, alignment, s);
  }
};

template <template <class, class> class Kernels, class... Dims>
int check_all(const char* kernels, HeadDimsList<Dims...>) {
  return ((check<bfloat16, Dims, Kernels>(kernels, "bf16") + check<float16, Dims, Kernels>(kernels, "f16")) + ...);
}

}  // namespace

#ifdef ATTENTION_TEST_QK_DIM  // one kind of head dims alone compiles faster
using Dims = pleat::HeadDimsList<pleat::HeadDims<ATTENTION_TEST_QK_DIM, ATTENTION_TEST_V_DIM>>;
using OfSm80 = Dims;
#else
using Dims = pleat::AllHeadDims;
using OfSm80 = pleat::HeadDimsList<pleat::HeadDims<256, 256>>;  // smaller ones have the same tiles
#endif
int main() {
  if (gpu_testing::lacks_gpus(1)) return gpu_testing::skipped;
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  std::printf("%70s out, lse, dq, dk, dv: relative L2\n", "");
  const int failed = check_all<attention_kernel::Portable>("portable", Dims{}) +
                     check_all<PortableOfSm80>("of sm_80", OfSm80{}) +
                     check_all<attention_kernel::KernelTable>("fastest", Dims{});
  std::printf(failed == 0 ? "all passed\n" : "%d FAILED\n", failed);
  return failed == 0 ? 0 : 1;
}
