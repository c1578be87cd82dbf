// The one table of how collectives move bytes on peer-mapped memory. Its numbers come from bench/comm_bench.
#pragma once

#include <cstddef>

namespace pleat::inline v0 {

/// Chosen for two H200s: a copy engine starts late but leaves the multiprocessors alone and reaches 390 GB/s; a kernel
/// that stores to its peers and signals itself takes some of them and saves the start.
struct TransferTable {
  /// Blocks up to here travel by stores of a kernel, where peers have one; larger ones by copies.
  std::size_t store_bytes = std::size_t{512} << 10;
  /// CTAs of that kernel.
  int store_ctas = 16;
  /// From here on a rank copies its own block beside the transfers, on the other stream.
  std::size_t beside_bytes = std::size_t{1} << 20;
};

}  // namespace pleat::inline v0
