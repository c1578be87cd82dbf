// The text of an error, built from values without <string>, so that the mesh headers stay cheap to include.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pleat::inline v0 {

/// What can be added to a pointer: std::integral without `<concepts>`, which would cost more than the mesh headers do.
template <class T>
concept integer = requires(T value, const char* pointer) {
  pointer + value;
};

/// A bounded text; what does not fit ends in "...". Part of every exception, so copying one never throws.
class Message {
 public:
  static constexpr int capacity_bytes = 1024;

  constexpr const char* c_str() const noexcept { return text_; }
  constexpr int size() const noexcept { return size_; }

  constexpr Message& append(const char* text) noexcept {
    while (*text != '\0') put(*text++);
    return *this;
  }
  constexpr Message& append(const char* text, std::size_t size) noexcept {
    for (std::size_t i = 0; i < size; ++i) put(text[i]);
    return *this;
  }
  constexpr Message& append(const Message& other) noexcept { return append(other.c_str()); }
  template <integer Int>
  constexpr Message& append(Int value) noexcept {
    char digits[24] = {};
    int n = 0;
    std::uint64_t rest = static_cast<std::uint64_t>(value);
    if constexpr (static_cast<Int>(-1) < static_cast<Int>(0)) {
      if (value < 0) {
        put('-');
        rest = 0 - rest;
      }
    }
    do digits[n++] = static_cast<char>('0' + rest % 10);
    while ((rest /= 10) != 0);
    while (n > 0) put(digits[--n]);
    return *this;
  }
  /// Up to 6 significant digits.
  constexpr Message& append(double value) noexcept {
    if (value != value) return append("nan");
    if (value < 0) {
      put('-');
      value = -value;
    }
    if (value > 0x1.fffffffffffffp+1023) return append("inf");
    if (value == 0) return append(0);
    constexpr int most_digits = 6;
    int exponent = 0;
    for (; value >= 10; value /= 10) ++exponent;
    for (; value < 1; value *= 10) --exponent;
    auto digits = static_cast<std::uint64_t>(value * 1e5);
    if (value * 1e5 - static_cast<double>(digits) >= 0.5) ++digits;
    if (digits == 1'000'000) {
      digits = 100'000;
      ++exponent;
    }
    int count = most_digits;
    for (; digits % 10 == 0; digits /= 10) --count;
    char text[most_digits] = {};
    for (int i = count; i > 0; digits /= 10) text[--i] = static_cast<char>('0' + digits % 10);
    const bool is_plain = exponent >= -5 && exponent < most_digits;
    const int before_point = is_plain ? exponent + 1 : 1;
    if (before_point <= 0) put('0');
    for (int i = 0; i < before_point; ++i) put(i < count ? text[i] : '0');
    if (count > before_point) put('.');
    for (int i = before_point; i < 0; ++i) put('0');
    for (int i = before_point > 0 ? before_point : 0; i < count; ++i) put(text[i]);
    if (!is_plain) append("e").append(exponent);
    return *this;
  }
  constexpr Message& append(bool value) noexcept { return append(value ? "true" : "false"); }
  constexpr Message& append(char c) noexcept {
    put(c);
    return *this;
  }

 private:
  constexpr void put(char c) noexcept {
    if (size_ + 1 < capacity_bytes) {
      text_[size_++] = c;
    } else {
      for (int i = size_ - 3; i < size_; ++i) text_[i] = '.';
    }
  }

  char text_[capacity_bytes] = {};
  int size_ = 0;
};

// Most parts of an error text; as functions of their own they spare an instantiation for every length of a literal.
/// Appends one part of a text.
constexpr void append_part(Message& message, const char* text) {
  message.append(text);
}
constexpr void append_part(Message& message, int value) {
  message.append(value);
}

/// Anything with `append_to(Message&, const T&)` found by argument-dependent lookup is a part of an error text as well.
template <class T>
constexpr void append_part(Message& message, const T& part) {
  if constexpr (requires { append_to(message, part); }) {
    append_to(message, part);
  } else if constexpr (requires { message.append(part.data(), part.size()); }) {
    message.append(part.data(), part.size());
  } else {
    message.append(part);
  }
}

/// A list of integers in an error text: values separated by one blank.
/// Shapes: `values[count]`, borrowed for the call.
template <class Int>
struct List {
  const Int* values;
  std::size_t count;
};
template <class Int>
constexpr void append_to(Message& message, const List<Int>& list) {
  for (std::size_t i = 0; i < list.count; ++i) {
    if (i != 0) message.append(' ');
    message.append(list.values[i]);
  }
}

/// The valid indices of `count` things in an error text.
struct Indices {
  long long count;
};
constexpr void append_to(Message& message, Indices indices) {
  if (indices.count <= 0) {
    message.append("none");
  } else {
    message.append("0 to ").append(indices.count - 1);
  }
}

/// The divisors of `n` in ascending order: the valid choices of most degrees.
struct Divisors {
  long long of;
};
constexpr void append_to(Message& message, Divisors divisors) {
  const char* separator = "";
  const auto put = [&](long long d) {
    message.append(separator).append(d);
    separator = " ";
  };
  for (long long d = 1; d <= divisors.of / d; ++d) {
    if (divisors.of % d == 0) put(d);
  }
  long long d = 1;
  while (d <= divisors.of / d) ++d;
  for (--d; d >= 1; --d) {
    if (divisors.of % d == 0 && divisors.of / d != d) put(divisors.of / d);
  }
}

}  // namespace pleat::inline v0
