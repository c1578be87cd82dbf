// A latent's expansion that costs little but its memory: keys and values are sums of two of the latent's numbers.
#pragma once

#include <pleat/attention/expansion.hpp>
#include <pleat/cuda/kernel.hpp>

namespace ring_attention_bench {

using pleat::bfloat16;
using pleat::TensorRef;

/// Rows of contiguous tensors; a latent's rows are `pitch` numbers apart.
struct LatentSizes {
  int latent, pitch, keys, values;  // numbers of a row, keys and values of all heads

  static LatentSizes of(const TensorRef& latent, const TensorRef& keys, const TensorRef& values) {
    const auto row = [](const TensorRef& t) { return static_cast<int>(t.extent(2) * t.extent(3)); };
    return {static_cast<int>(latent.extent(2)), static_cast<int>(latent.stride(1)), row(keys), row(values)};
  }
};

PLEAT_KERNEL void expand_rows(LatentSizes n, const bfloat16* latent, bfloat16* keys, bfloat16* values) {
  const std::int64_t row = blockIdx.x;
  const bfloat16* const from = latent + row * n.pitch;
  for (int i = static_cast<int>(threadIdx.x); i < n.keys + n.values; i += static_cast<int>(blockDim.x)) {
    const auto sum = static_cast<float>(from[i % n.latent]) + static_cast<float>(from[(i + i / n.latent) % n.latent]);
    if (i < n.keys) {
      keys[row * n.keys + i] = bfloat16(0.7f * sum);
    } else {
      values[row * n.values + i - n.keys] = bfloat16(0.7f * sum);
    }
  }
}
PLEAT_KERNEL void gather_rows(LatentSizes n, const float* dkeys, const float* dvalues, float* dlatent,
                              bool accumulate) {
  const std::int64_t row = blockIdx.x;
  for (int i = static_cast<int>(threadIdx.x); i < n.latent; i += static_cast<int>(blockDim.x)) {
    float sum = 0;
    const auto add = [&](int at) {
      sum += at < n.keys ? dkeys[row * n.keys + at] : dvalues[row * n.values + at - n.keys];
    };
    for (int first = 0; first < n.keys + n.values; first += n.latent) {
      if (first + i < n.keys + n.values) add(first + i);
      const int other = first + (i + n.latent - first / n.latent % n.latent) % n.latent;
      if (other < n.keys + n.values) add(other);
    }
    float& to = dlatent[row * n.pitch + i];
    to = 0.7f * sum + (accumulate ? to : 0.0f);
  }
}

struct LatentExpander {
  void expand(const TensorRef& latent, const TensorRef& keys, const TensorRef& values, cudaStream_t s) const {
    if (latent.elems() == 0) return;
    expand_rows<<<static_cast<unsigned>(latent.extent(1)), 256, 0, s>>>(
        LatentSizes::of(latent, keys, values), latent.as<const bfloat16>(), keys.as<bfloat16>(), values.as<bfloat16>());
    pleat::check_launch("expand_rows");
  }
  void expand_backward(const TensorRef&, const TensorRef& dkeys, const TensorRef& dvalues, const TensorRef& dlatent,
                       bool accumulate, cudaStream_t s) const {
    if (dlatent.elems() == 0) return;
    gather_rows<<<static_cast<unsigned>(dlatent.extent(1)), 256, 0, s>>>(
        LatentSizes::of(dlatent, dkeys, dvalues), dkeys.as<const float>(), dvalues.as<const float>(),
        dlatent.as<float>(), accumulate);
    pleat::check_launch("gather_rows");
  }
};

}  // namespace ring_attention_bench
