// What a machine can do: the one table of ceilings that times and overheads are made of, each with where it was
// measured.
#pragma once

#include <cstddef>

#include <pleat/estimate/rates.hpp>

namespace pleat::inline v0::estimate {

/// A number with its unit, and where it was measured.
struct Ceiling {
  const char* name;
  double value;
  const char* unit;
  const char* source;
};

/// H200 and H100 rates are those of the same chip, so one table serves both; what was not measured says so.
namespace ceiling {
inline constexpr Ceiling gemm{"dense products, bf16", 783e12, "FLOP/s", "cuBLAS 8192^3, one H200, docs/benchmarks.md"};
inline constexpr Ceiling grouped{"grouped products, bf16", 770e12, "FLOP/s",
                                 "65536/2048/2816/32, forward, one H200, docs/benchmarks.md"};
inline constexpr Ceiling attention_forward{"attention forward, bf16 causal", 718e12, "FLOP/s",
                                           "16 heads of 256, 16k tokens, one H200, docs/benchmarks.md"};
inline constexpr Ceiling attention_backward{"attention backward, bf16 causal", 584e12, "FLOP/s",
                                            "the same, sums in any order, docs/benchmarks.md"};
inline constexpr Ceiling memory{"copy in device memory", 4134e9, "B/s",
                                "cudaMemcpyAsync, one H200, docs/benchmarks.md"};
inline constexpr Ceiling nvlink{"NVLink, each way", 376e9, "B/s",
                                "copies to the peer both ways at once, 64 MiB, two H200, docs/benchmarks.md"};
inline constexpr Ceiling network{"network, each way", 50e9, "B/s", "not measured: a 400 Gb/s adapter per GPU"};
inline constexpr Ceiling context{"CUDA context and loaded kernels", 0.55 * (1 << 30), "B",
                                 "527 MiB and 27 to 41 MiB beside what the trainer counts, one H200, driver 580"};
inline constexpr Ceiling kernels{"workspace of kernels, of each lane", 48.0 * (1 << 20), "B",
                                 "cuBLASLt 32 MiB and conversions 16 MiB of examples/train_moe/cuda"};
inline constexpr Ceiling communicator{
    "NCCL communicator", 0.70 * (1 << 30), "B",
    "0.68 each where a rank has four, 0.73 where it has two; of two ranks, H200, NCCL 2.28.9"};
}  // namespace ceiling

/// All of them.
inline constexpr Ceiling ceilings[] = {
    ceiling::gemm,    ceiling::grouped,     ceiling::attention_forward, ceiling::attention_backward,
    ceiling::memory,  ceiling::nvlink,      ceiling::network,           ceiling::kernels,
    ceiling::context, ceiling::communicator};

/// The ceilings as numbers, and what operations reach, to be replaced by those of another machine.
struct Machine {
  double gemm = ceiling::gemm.value;
  double grouped = ceiling::grouped.value;
  double attention_forward = ceiling::attention_forward.value;
  double attention_backward = ceiling::attention_backward.value;
  double memory = ceiling::memory.value;
  double nvlink = ceiling::nvlink.value;
  double network = ceiling::network.value;
  std::size_t kernels_bytes = static_cast<std::size_t>(ceiling::kernels.value);
  std::size_t context_bytes = static_cast<std::size_t>(ceiling::context.value);
  std::size_t communicator_bytes = static_cast<std::size_t>(ceiling::communicator.value);
  Rates rates = {};
};

}  // namespace pleat::inline v0::estimate
