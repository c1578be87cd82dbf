// A reader of the JSON files in tests/facts: the expected values, as a tree of values that fail loudly.
#pragma once

#include <algorithm>
#include <charconv>
#include <concepts>
#include <cstdint>
#include <fstream>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

namespace testing_support {

/// One JSON value. Accessors throw std::runtime_error when the value is of another kind.
class Json {
 public:
  using Array = std::vector<Json>;
  using Object = std::map<std::string, Json>;

  static Json parse(const std::string& text) {
    Parser parser{text.data(), text.data() + text.size()};
    Json value = parser.value();
    if (parser.next() != '\0') parser.error("the end");
    return value;
  }
  static Json load(const std::string& path) {
    std::ifstream file(path);
    if (!file) throw std::runtime_error("cannot read " + path);
    std::ostringstream text;
    text << file.rdbuf();
    return parse(text.str());
  }
  /// The file `name` of tests/facts.
  static Json facts(const std::string& name) { return load(std::string(PLEAT_FACTS_DIR) + "/" + name); }

  bool is_null() const { return std::holds_alternative<std::nullptr_t>(value_); }
  bool is_number() const { return std::holds_alternative<double>(value_); }
  bool boolean() const { return as<bool>(); }
  double number() const { return as<double>(); }
  std::int64_t integer() const { return static_cast<std::int64_t>(as<double>()); }
  const std::string& text() const { return as<std::string>(); }
  const Array& array() const { return *as<std::shared_ptr<Array>>(); }
  const Object& object() const { return *as<std::shared_ptr<Object>>(); }

  const Json& operator[](const std::string& key) const {
    const auto found = object().find(key);
    if (found == object().end()) throw std::runtime_error("JSON: no member " + key);
    return found->second;
  }
  const Json& operator[](const char* key) const { return (*this)[std::string(key)]; }
  template <std::integral Index>
  const Json& operator[](Index i) const {
    return array().at(static_cast<std::size_t>(i));
  }
  bool contains(const std::string& key) const { return object().count(key) != 0; }
  std::size_t size() const { return array().size(); }

  std::vector<double> numbers() const {
    std::vector<double> all;
    for (const Json& item : array()) all.push_back(item.number());
    return all;
  }
  std::vector<std::int64_t> integers() const {
    std::vector<std::int64_t> all;
    for (const Json& item : array()) all.push_back(item.integer());
    return all;
  }

 private:
  using Value =
      std::variant<std::nullptr_t, bool, double, std::string, std::shared_ptr<Array>, std::shared_ptr<Object>>;

  template <class T>
  const T& as() const {
    if (!std::holds_alternative<T>(value_)) throw std::runtime_error("JSON: a value is of another kind");
    return std::get<T>(value_);
  }

  struct Parser {
    const char* at;
    const char* end;

    char next() {
      while (at != end && (*at == ' ' || *at == '\n' || *at == '\t' || *at == '\r')) ++at;
      return at == end ? '\0' : *at;
    }
    [[noreturn]] void error(const std::string& wanted) const {
      throw std::runtime_error("JSON: expected " + wanted + " at: " + std::string(at, std::min(end, at + 20)));
    }
    void expect(const std::string& word) {
      next();
      if (static_cast<std::size_t>(end - at) < word.size() || std::string(at, word.size()) != word) error(word);
      at += word.size();
    }
    template <class Item>
    void list(char open, char close, Item item) {
      expect(std::string(1, open));
      if (next() != close) {
        for (item(); next() == ','; item()) ++at;
      }
      expect(std::string(1, close));
    }
    std::string text() {
      expect("\"");
      std::string made;
      for (; at != end && *at != '"'; ++at) {
        if (*at == '\\') {
          if (++at == end || *at == 'u') error("a plain escape");
          made += *at == 'n' ? '\n' : *at == 't' ? '\t' : *at;
        } else {
          made += *at;
        }
      }
      expect("\"");
      return made;
    }
    Json value() {
      Json made;
      switch (next()) {
        case '{': {
          auto members = std::make_shared<Object>();
          list('{', '}', [&] {
            std::string key = text();
            expect(":");
            (*members)[key] = value();
          });
          made.value_ = members;
          break;
        }
        case '[': {
          auto items = std::make_shared<Array>();
          list('[', ']', [&] { items->push_back(value()); });
          made.value_ = items;
          break;
        }
        case '"':
          made.value_ = text();
          break;
        case 't':
          expect("true");
          made.value_ = true;
          break;
        case 'f':
          expect("false");
          made.value_ = false;
          break;
        case 'n':
          expect("null");
          break;
        default: {
          double number = 0;
          const auto [last, failure] = std::from_chars(at, end, number);
          if (failure != std::errc{}) error("a value");
          at = last;
          made.value_ = number;
        }
      }
      return made;
    }
  };

  Value value_ = nullptr;
};

}  // namespace testing_support
