// What validation accepts and how it judges: the gate of logs, envelope and signal, medians.
#include <cmath>
#include <cstdio>
#include <fstream>

#include <doctest/doctest.h>

#include "options.hpp"
#include "validate/log.hpp"
#include "validate/verdict.hpp"

using namespace validate;

namespace {

std::string line(int step, const std::string& commit = "abc", const std::string& loss = "5.5") {
  return "{\"step\": " + std::to_string(step) + ", \"loss\": " + loss +
         ", \"balance\": 0.25, \"norm\": 2, \"lr\": 1e-6, \"tokens\": 10, \"seconds\": 0.5, \"peak_bytes\": 7, "
         "\"commit\": \"" +
         commit + "\"}\n";
}
Log read(const std::string& text, int first = 1, int last = 2) {
  const char* const name = "validate_test.json";
  std::ofstream(name) << text;
  struct Remove {
    const char* name;
    ~Remove() { std::remove(name); }
  } remove{name};
  return read_log(name, first, last);
}
void refuses(const std::string& text, const char* why) {
  CAPTURE(text);
  CHECK_THROWS_WITH_AS(read(text), doctest::Contains(why), train_moe::usage_error);
}

}  // namespace

TEST_CASE("a log holds its steps once each and in order, of one commit, in finite numbers") {
  const Log log = read(line(1) + line(2));
  CHECK(log.commit == "abc");
  REQUIRE(log.entries.size() == 2);
  CHECK(log.column(&Entry::loss) == std::vector<double>{5.5, 5.5});
  CHECK(log.entries[1].seconds == 0.5);
  CHECK(log.entries[1].peak_bytes == 7);
  CHECK(read(line(3) + line(4), 3, 4).entries.size() == 2);
  refuses(line(1), "holds 1 of 2 steps");
  refuses(line(1) + line(2) + line(3), "holds 3 of 2 steps");
  refuses(line(2) + line(1), "has step 2 where step 1 belongs");
  refuses(line(1) + line(1), "has step 1 where step 2 belongs");
  refuses(line(1) + line(2, ""), "names no commit");
  refuses(line(1) + line(2, "abd"), "another commit");
  refuses(line(1) + line(2, "abc", "nan"), "\"loss\" is no finite number");
  refuses(line(1) + line(2, "abc", "5.5x"), "\"loss\" is no finite number");
  refuses(line(1) + line(2, "abc", "null"), "\"loss\" is no finite number");
  refuses("", "holds 0 of 2 steps");
  CHECK_THROWS_WITH_AS(read_log("no such log", 1, 2), "no such log cannot be read", train_moe::usage_error);
  CHECK_THROWS_WITH_AS(require_one_commit({log, read(line(1, "x") + line(2, "x"))}), "logs of two commits, abc and x",
                       train_moe::usage_error);
}

TEST_CASE("steps in which tokens took other experts are told apart") {
  Log a = read(line(1) + line(2)), b = a;
  CHECK(steps_alike(a, b).size() == 2);
  a.entries[0].routing = "1";
  CHECK(steps_alike(a, b) == std::vector<std::size_t>{1});
  CHECK(a.column(&Entry::loss, steps_alike(a, b)) == std::vector<double>{5.5});
}

TEST_CASE("verdicts: below 3 passes, from 5 on fails, no signal passes and no envelope does not") {
  const auto verdict = [](double envelope, double signal) { return Comparison{envelope, signal}.verdict(); };
  CHECK(verdict(1, 2.99) == Verdict::pass);
  CHECK(verdict(1, 3) == Verdict::warn);
  CHECK(verdict(1, 4.99) == Verdict::warn);
  CHECK(verdict(1, 5) == Verdict::fail);
  CHECK(verdict(0, 0) == Verdict::pass);
  CHECK(verdict(0, 1e-300) == Verdict::fail);
  CHECK(verdict(1, std::nan("")) == Verdict::fail);
  CHECK(mean_difference({1, 2}, {1.5, 2.5}) == 0.5);
  CHECK(std::isnan(mean_difference({1, std::nan("")}, {1, 1})));
}

TEST_CASE("times are medians without the first") {
  CHECK(median_after_first({100, 3, 1, 2}) == 2);
  CHECK(median_after_first({100, 3, 1, 2, 4}) == 2.5);
  CHECK(percent_more(2, 3) == doctest::Approx(50));
}
