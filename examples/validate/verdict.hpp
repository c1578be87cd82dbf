// What is made of logs: how far two runs lie apart against how far rounding alone takes them, and medians of times.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <vector>

namespace validate {

enum class Verdict : unsigned char { pass, warn, fail };
constexpr const char* name_of(Verdict verdict) {
  return verdict == Verdict::pass ? "PASS" : verdict == Verdict::warn ? "warn" : "FAIL";
}

/// `signal` is how far a feature's curve lies from the base's, `envelope` how far the base's from one that only
/// rounding tells from it; each the mean of absolute differences over steps.
struct Comparison {
  double envelope = 0;
  double signal = 0;

  /// 0 where there is no signal at all, infinite for a signal without any envelope.
  double ratio() const {
    if (signal == 0) return 0;
    return envelope == 0 ? std::numeric_limits<double>::infinity() : signal / envelope;
  }
  Verdict verdict() const { return ratio() < 3 ? Verdict::pass : ratio() < 5 ? Verdict::warn : Verdict::fail; }
};

/// Of as many values each; a NaN anywhere makes a NaN, which fails.
inline double mean_difference(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += std::abs(a[i] - b.at(i));
  return a.empty() ? 0 : sum / static_cast<double>(a.size());
}
/// The median without the first value, which warms up. Needs two values.
inline double median_after_first(std::vector<double> all) {
  const std::span<double> values = std::span(all).subspan(1);
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}
/// How much more b is than a, in percent.
inline double percent_more(double a, double b) {
  return 100 * (b / a - 1);
}

}  // namespace validate
