// How many rows each expert has in the benchmarks of grouped products; bench/peers/grouped_mm.py draws the same ones.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace moe_bench {

/// `rows` rows for `experts` experts. `equal`; or three experts have 0, 1 and 127 and the others' rows are drawn one by
/// one, evenly (`multinomial`) or with weights 1, 1/2, 1/3, ... (`zipf`).
inline std::vector<std::int64_t> group_sizes(const std::string& kind, std::int64_t rows, int experts) {
  const auto count = static_cast<std::size_t>(experts);
  if (kind == "equal") return std::vector<std::int64_t>(count, rows / experts);
  std::vector<std::int64_t> sizes(count);
  sizes[0] = 127;
  sizes[count / 2] = 1;
  sizes[count - 1] = 0;
  std::vector<std::size_t> drawn;  // the experts whose rows are drawn, and the sums of their weights
  std::vector<double> until;
  for (std::size_t e = 1; e + 1 < count; ++e) {
    if (e == count / 2) continue;
    const double weight = kind == "zipf" ? 1.0 / static_cast<double>(drawn.size() + 1) : 1.0;
    until.push_back((until.empty() ? 0.0 : until.back()) + weight);
    drawn.push_back(e);
  }
  std::uint64_t state = 1;
  for (std::int64_t row = 128; row < rows; ++row) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    const double at = static_cast<double>(state >> 33) / 2147483648.0 * until.back();
    std::size_t first = 0, last = drawn.size() - 1;
    while (first < last) {
      const std::size_t middle = (first + last) / 2;
      if (until[middle] > at) {
        last = middle;
      } else {
        first = middle + 1;
      }
    }
    ++sizes[drawn[first]];
  }
  return sizes;
}

}  // namespace moe_bench
