// The CUDA kernels on the cases of their contract, in one dtype and kind of head dims; tests/gpu has all of them.
#include <doctest/doctest.h>

#include <support/copy_now.hpp>

#include "unit/attention/cuda_leaf_cases.cuh"
#include "unit/attention/expect_error.hpp"

namespace {

using namespace attention_testing;
using Leaf = CudaAttention<TypeList<bfloat16>, HeadDimsList<HeadDims<64, 64>>, attention_kernel::Portable>;

TEST_CASE("forward, delta, backward and store against the host in float64") {
  for (const LeafCase& c : leaf_cases(64, 64)) {
    const unsigned seed = std::random_device{}();
    CAPTURE(c.name);
    CAPTURE(seed);
    CHECK(check_leaf<bfloat16, Leaf>(c, seed).failure == "");
  }
}

TEST_CASE("A06, A09, A10, T01: what a kernel does not take") {
  DeviceTensor<bfloat16> tensor(Rows::contiguous, 1, 16, 1, 64), wide(Rows::contiguous, 1, 16, 1, 72);
  DeviceTensor<float> sums(Rows::contiguous, 1, 16, 1, 64), lse(Rows::contiguous, 1, 16, 1, 1);
  const std::vector<Rectangle> work{{0, 16, 0, 16}};
  const CudaBuffer placed(sizeof(Rectangle));
  testing_support::copy_now(placed.data(), work.data(), sizeof(Rectangle));
  finish_uploads();
  const AttentionForward good{tensor.ref(),
                              tensor.ref(),
                              tensor.ref(),
                              WorkView(work, reinterpret_cast<const Rectangle*>(placed.data())),
                              1,
                              sums.ref(),
                              lse.statistics(),
                              tensor.ref()};
  const CudaStream s;
  CHECK_NOTHROW(Leaf::forward(good, s));
  check_cuda(cudaStreamSynchronize(s), "cudaStreamSynchronize");
  const auto refuses = [&](const char* text, auto spoil) {
    AttentionForward call = good;
    spoil(call);
    expect_error<shape_error>(text, [&] { Leaf::forward(call, s); });
  };
  refuses("pleat[A06]: qk_dim=72, v_dim=64", [&](AttentionForward& call) { call.q = call.k = wide.ref(); });
  refuses("pleat[A09]: the work of a CUDA kernel, 1 rectangles,", [&](AttentionForward& call) { call.work = work; });
  refuses("pleat[A10]: the scale", [](AttentionForward& call) { call.scale = -1; });
  refuses("pleat[T01]: dtype f32", [&](AttentionForward& call) { call.q = sums.ref(); });
}

}  // namespace
