// What rank 0 logs of a step is JSON, also of one that diverged.
#include <cstdio>
#include <fstream>
#include <limits>
#include <string>

#include <doctest/doctest.h>

#include "run.hpp"
#include "small_run.hpp"

TEST_CASE("numbers that are not finite are logged as null, which JSON has") {
  using Limits = std::numeric_limits<double>;
  const TextFile text(4096);
  const char* const log = "train_moe_run_test.json";
  train_moe::Run run(options_of({"--text", text.name().c_str(), "--quiet", "--json", log}));
  train_moe::StepReport report{.loss = -Limits::quiet_NaN(), .balance = 0.25, .norm = Limits::infinity()};
  report.tokens = 10;
  run.show_step(3, report, {}, 0.0, 7);
  run.json.close();
  std::string line;
  std::getline(std::ifstream(log), line);
  std::remove(log);
  CHECK(
      line.starts_with("{\"step\": 3, \"tokens\": 10, \"loss\": null, \"balance\": 0.25, \"norm\": null, \"lr\": 0, "
                       "\"seconds\": 0.000000, \"tokens_per_second\": null, "));
  CHECK(line.ends_with("\"update\": 0.000000, \"peak_bytes\": 7, \"routing\": \"\", \"commit\": \"abc\"}"));
}
