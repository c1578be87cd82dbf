// Numbers of a command line, with the range that each may be in.
#pragma once

#include <charconv>
#include <sstream>
#include <string>
#include <type_traits>

#include "options.hpp"

namespace train_moe {

/// The numbers that a flag takes.
template <class Number>
struct Range {
  Number least;
  Number most;

  bool contains(Number value) const { return value >= least && value <= most; }  // false for a NaN
  std::string text() const {
    std::ostringstream out;
    if constexpr (std::is_floating_point_v<Number>) {
      out << "a finite number of at least " << least;
    } else {
      out << least << " to " << most;
    }
    return out.str();
  }
};
/// Errors: usage_error with what was given and what is valid.
template <class Number>
Number parse_number(const std::string& flag, const std::string& text, const Range<Number>& valid) {
  Number value{};
  const char* const last = text.data() + text.size();
  const auto [end, error] = std::from_chars(text.data(), last, value);
  if (error == std::errc::invalid_argument || end != last) {
    throw usage_error(flag + " needs a number; it was given '" + text + "'; valid: " + valid.text());
  }
  if (error != std::errc{} || !valid.contains(value)) {
    throw usage_error(flag + " " + text + " is out of range; valid: " + valid.text());
  }
  return value;
}

}  // namespace train_moe
