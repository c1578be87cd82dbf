// Choices of moe_bench: uniform, Zipf and balanced, the same in every run.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace moe_bench {

/// ids [tokens, k] of distinct experts. `kind`: uniform; zipf, where the i-th most popular expert is drawn in
/// proportion to 1 / i, and popular ones are spread evenly over the ranks; balanced, where token t takes expert
/// (t + j * (experts / k)) % experts.
inline std::vector<std::int32_t> draw_ids(const std::string& kind, std::int64_t tokens, int experts, int k, int ranks,
                                          unsigned seed) {
  std::vector<std::int32_t> ids(static_cast<std::size_t>(tokens * k));
  std::vector<double> until(static_cast<std::size_t>(experts));
  for (int e = 0; e < experts; ++e) until[static_cast<std::size_t>(e)] = kind == "zipf" ? 1.0 / (e + 1) : 1.0;
  std::partial_sum(until.begin(), until.end(), until.begin());
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<double> uniform(0, until.back());
  for (std::int64_t t = 0; t < tokens; ++t) {
    std::int32_t* const chosen = ids.data() + t * k;
    for (int j = 0; j < k; ++j) {
      if (kind == "balanced") {
        chosen[j] = static_cast<std::int32_t>((t + j * (experts / k)) % experts);
        continue;
      }
      do {
        const auto place = std::upper_bound(until.begin(), until.end(), uniform(random)) - until.begin();
        const auto popular = static_cast<std::int32_t>(std::min<std::ptrdiff_t>(place, experts - 1));
        chosen[j] = popular % ranks * (experts / ranks) + popular / ranks;
      } while (std::find(chosen, chosen + j, chosen[j]) != chosen + j);
    }
  }
  return ids;
}

}  // namespace moe_bench
