// The little JSON that checkpoints need: a reader that walks a text once and builds nothing, and quoted strings.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

#include <pleat/checkpoint/error.hpp>

namespace pleat::inline v0::checkpoint {

/// Walks a JSON text: the caller says what comes next, and each call takes it. `text` and `where` (the file, for error
/// texts) are borrowed. Errors: checkpoint_error K01 with the byte, for anything that is no JSON or another kind of
/// value.
class JsonReader {
 public:
  JsonReader(std::string_view text, const std::string& where) : text_(text), where_(where) {}

  /// Calls f(key) for each member; f takes the value. Keys may repeat: who collects them looks.
  template <class F>
  void object(F f) {
    list('{', '}', [&] {
      const std::string key = string();
      expect(':');
      f(key);
    });
  }
  /// Calls f() for each item; f takes it.
  template <class F>
  void array(F f) {
    list('[', ']', f);
  }
  std::string string() {
    expect('"');
    std::string made;
    while (true) {
      if (at_ == text_.size()) wanted("the end of a string");
      const char c = text_[at_++];
      if (c == '"') return made;
      if (static_cast<unsigned char>(c) < 0x20) wanted("no control character in a string");
      if (c == '\\') {
        escape(made);
      } else {
        made += c;
      }
    }
  }
  /// A whole number from 0 to 2^63 - 1.
  std::int64_t integer() {
    constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
    if (!is_digit(peek())) wanted("a whole number of 0 or more");
    const std::size_t first = at_;
    std::int64_t value = 0;
    for (; at_ < text_.size() && is_digit(text_[at_]); ++at_) {
      const std::int64_t digit = text_[at_] - '0';
      if (value > (most - digit) / 10) wanted("a number below 2^63");
      value = value * 10 + digit;
    }
    const bool goes_on = at_ < text_.size() && (text_[at_] == '.' || text_[at_] == 'e' || text_[at_] == 'E');
    if (goes_on || (text_[first] == '0' && at_ - first > 1)) wanted("a whole number");
    return value;
  }
  /// A string, or a number, true, false or null as it stands.
  std::string text() { return peek() == '"' ? string() : std::string(scalar()); }
  /// Takes any value, of at most 64 levels.
  void skip(int levels = 64) {
    if (levels == 0) wanted("fewer levels");
    const char c = peek();
    if (c == '{') {
      object([&](const std::string&) { skip(levels - 1); });
    } else if (c == '[') {
      array([&] { skip(levels - 1); });
    } else if (c == '"') {
      string();
    } else {
      scalar();
    }
  }
  /// Nothing but blanks is left.
  void end() {
    if (peek() != '\0' || at_ != text_.size()) wanted("the end");
  }

 private:
  static bool is_digit(char c) { return c >= '0' && c <= '9'; }

  [[noreturn]] void wanted(const char* what) const {
    fail<checkpoint_error>("pleat[K01]: ", where_, " is not JSON as it should be: expected ", what, " at byte ", at_,
                           "; the file is damaged, or another program's");
  }
  /// The next character that is no blank; 0 at the end.
  char peek() {
    while (at_ < text_.size() && std::string_view(" \n\t\r").find(text_[at_]) != std::string_view::npos) ++at_;
    return at_ < text_.size() ? text_[at_] : '\0';
  }
  void expect(char c) {
    const char name[] = {'\'', c, '\'', '\0'};
    if (peek() != c) wanted(name);
    ++at_;
  }
  template <class Item>
  void list(char open, char close, Item item) {
    expect(open);
    if (peek() == close) {
      ++at_;
      return;
    }
    while (true) {
      item();
      if (peek() == close) {
        ++at_;
        return;
      }
      expect(',');
    }
  }
  void escape(std::string& made) {
    constexpr std::string_view names = "\"\\/bfnrt", values = "\"\\/\b\f\n\r\t";
    const char c = at_ < text_.size() ? text_[at_++] : '\0';
    if (const std::size_t i = names.find(c); i != std::string_view::npos && c != '\0') {
      made += values[i];
      return;
    }
    if (c != 'u') wanted("an escape");
    std::uint32_t code = hex();
    if (code >= 0xd800 && code < 0xdc00) {
      if (text_.substr(at_, 2) != "\\u") wanted("the second half of a surrogate pair");
      at_ += 2;
      const std::uint32_t low = hex();
      if (low < 0xdc00 || low >= 0xe000) wanted("the second half of a surrogate pair");
      code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    } else if (code >= 0xdc00 && code < 0xe000) {
      wanted("the first half of a surrogate pair");
    }
    append_utf8(made, code);
  }
  std::uint32_t hex() {
    std::uint32_t value = 0;
    for (int i = 0; i < 4; ++i, ++at_) {
      constexpr std::string_view digits = "0123456789abcdef";
      const char c = at_ < text_.size() ? text_[at_] : ' ';
      const std::size_t digit = digits.find(c >= 'A' && c <= 'F' ? static_cast<char>(c + ('a' - 'A')) : c);
      if (digit == std::string_view::npos) wanted("four hexadecimal digits");
      value = value * 16 + static_cast<std::uint32_t>(digit);
    }
    return value;
  }
  static void append_utf8(std::string& made, std::uint32_t code) {
    const auto put = [&](std::uint32_t byte) { made += static_cast<char>(byte); };
    const auto tail = [&](int shift) { put(0x80 | ((code >> shift) & 0x3f)); };
    if (code < 0x80) {
      put(code);
    } else if (code < 0x800) {
      put(0xc0 | (code >> 6)), tail(0);
    } else if (code < 0x10000) {
      put(0xe0 | (code >> 12)), tail(6), tail(0);
    } else {
      put(0xf0 | (code >> 18)), tail(12), tail(6), tail(0);
    }
  }
  /// A number, true, false or null.
  std::string_view scalar() {
    for (const std::string_view word : {"true", "false", "null"}) {
      if (text_.substr(at_, word.size()) == word) {
        at_ += word.size();
        return word;
      }
    }
    const std::size_t first = at_;
    const auto digits = [&] {
      if (at_ == text_.size() || !is_digit(text_[at_])) wanted("a value");
      while (at_ < text_.size() && is_digit(text_[at_])) ++at_;
    };
    const auto take = [&](std::string_view any) {
      const bool found = at_ < text_.size() && any.find(text_[at_]) != std::string_view::npos;
      at_ += found;
      return found;
    };
    take("-");
    digits();
    if (take(".")) digits();
    if (take("eE")) {
      take("+-");
      digits();
    }
    return text_.substr(first, at_ - first);
  }

  std::string_view text_;
  const std::string& where_;
  std::size_t at_ = 0;
};

/// `text` as a JSON string.
inline std::string quoted_json(std::string_view text) {
  constexpr std::string_view hex = "0123456789abcdef";
  std::string made = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      made += {'\\', c};
    } else if (byte < 0x20) {
      made += {'\\', 'u', '0', '0', hex[byte >> 4], hex[byte & 15]};
    } else {
      made += c;
    }
  }
  return made + '"';
}

}  // namespace pleat::inline v0::checkpoint
