// The one table of how collectives move bytes on peer-mapped memory. Its numbers come from bench/comm_bench.
#pragma once

#include <array>
#include <cstddef>

#include <pleat/core/message.hpp>

namespace pleat::inline v0 {

/// Blocks of at most `up_to_bytes` are moved by one kernel of `ctas` CTAs, which signals its peers itself.
struct KernelStep {
  std::size_t up_to_bytes = 0;
  int ctas = 0;
};

/// Steps in rising order of size; empty ones, of no bytes, hold nothing.
using KernelSteps = std::array<KernelStep, 8>;

/// The CTAs that move blocks of `bytes`; 0 where no kernel does.
constexpr int ctas_of(const KernelSteps& steps, std::size_t bytes) {
  for (const KernelStep& step : steps) {
    if (bytes <= step.up_to_bytes) return step.ctas;
  }
  return 0;
}
constexpr int most_ctas(const KernelSteps& steps) {
  int most = 0;
  for (const KernelStep& step : steps) most = step.ctas < most ? most : step.ctas;
  return most;
}
constexpr std::size_t largest_block(const KernelSteps& steps) {
  std::size_t largest = 0;
  for (const KernelStep& step : steps) largest = step.up_to_bytes < largest ? largest : step.up_to_bytes;
  return largest;
}
/// Those that blocks of at most `most_bytes` need; the last one ends there.
constexpr KernelSteps steps_up_to(const KernelSteps& table, std::size_t most_bytes) {
  KernelSteps steps = {};
  for (std::size_t i = 0; i < table.size() && table[i].up_to_bytes != 0 && largest_block(steps) < most_bytes; ++i) {
    steps[i] = {table[i].up_to_bytes < most_bytes ? table[i].up_to_bytes : most_bytes, table[i].ctas};
  }
  return steps;
}
constexpr void append_to(Message& message, const KernelSteps& steps) {
  for (std::size_t i = 0; i < steps.size() && steps[i].up_to_bytes != 0; ++i) {
    message.append(i == 0 ? "" : ",").append(steps[i].up_to_bytes).append(":").append(steps[i].ctas);
  }
}

/// Chosen for two H200s: a copy engine starts late but leaves the multiprocessors alone and reaches 390 GB/s; a kernel
/// that stores to its peers and signals itself takes some of them and saves the start. Window memory is kept for two
/// results of the largest step beside those of copies.
struct TransferTable {
  KernelSteps stores = {{{std::size_t{16} << 10, 4}, {std::size_t{4} << 20, 32}, {std::size_t{32} << 20, 64}}};
  /// From here on a copied result's own block is copied beside the transfers, on the other stream.
  std::size_t beside_bytes = std::size_t{1} << 20;
  /// Sums of blocks of wire bytes; larger ones leave the meeting to the streams, which wait without a multiprocessor.
  KernelSteps sums = {{{std::size_t{4} << 20, 32}, {std::size_t{32} << 20, 64}}};
};

}  // namespace pleat::inline v0
