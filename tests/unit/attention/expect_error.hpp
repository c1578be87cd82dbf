// Checks that a call throws a given type with a text that starts as given.
#pragma once

#include <exception>
#include <string>

#include <doctest/doctest.h>

template <class Error, class F>
void expect_error(const std::string& start, F f) {
  std::string text = "nothing was thrown";
  try {
    f();
  } catch (const Error& e) {
    text = e.what();
  } catch (const std::exception& e) {
    text = std::string("another type: ") + e.what();
  }
  CAPTURE(start);
  CHECK_MESSAGE(text.compare(0, start.size(), start) == 0, text);
}
