// The one table of how collectives move bytes on peer-mapped memory. Its numbers come from bench/comm_bench.
#pragma once

#include <array>
#include <cstddef>

namespace pleat::inline v0 {

/// Blocks of at most `up_to_bytes` travel by stores of a kernel of `ctas` CTAs.
struct StoreStep {
  std::size_t up_to_bytes = 0;
  int ctas = 0;
};

/// Steps in rising order of size; empty ones, of no bytes, hold nothing.
using StoreSteps = std::array<StoreStep, 8>;

/// The CTAs that store blocks of `bytes`; 0 where copies carry them.
constexpr int store_ctas_of(const StoreSteps& steps, std::size_t bytes) {
  for (const StoreStep& step : steps) {
    if (bytes <= step.up_to_bytes) return step.ctas;
  }
  return 0;
}

/// Chosen for two H200s: a copy engine starts late but leaves the multiprocessors alone and reaches 390 GB/s; a kernel
/// that stores to its peers and signals itself takes some of them and saves the start. Window memory is kept for two
/// results of the largest step beside those of copies.
struct TransferTable {
  StoreSteps stores = {{{std::size_t{16} << 10, 1},
                        {std::size_t{64} << 10, 4},
                        {std::size_t{256} << 10, 16},
                        {std::size_t{4} << 20, 32},
                        {std::size_t{8} << 20, 64},
                        {std::size_t{32} << 20, 132}}};
  /// From here on a copied result's own block is copied beside the transfers, on the other stream.
  std::size_t beside_bytes = std::size_t{1} << 20;
};

}  // namespace pleat::inline v0
