// Bad input is refused with the values and the valid choices.
#include <doctest/doctest.h>

#include "small_run.hpp"

using namespace train_moe;

TEST_CASE("what is not given is derived") {
  const Options o = options_of({"--mesh", "pp1-dp8-cp4-ep8"});
  CHECK(o.batch == 8);
  CHECK(o.micro_batch == 1);
  CHECK(o.micro_batches() == 1);
  CHECK(o.model.heads == 4);
  CHECK(o.model.kv_heads == 2);
  CHECK(options_of({"--mesh", "pp1-dp2-cp1-ep1", "--micro-batch", "3"}).batch == 6);
  CHECK(options_of({"--mesh", "pp1-dp2-cp1-ep1", "--batch", "12", "--micro-batch", "2"}).micro_batches() == 3);
}

TEST_CASE("bad input names the valid choices") {
  const auto refuses = [](std::vector<const char*> arguments, const char* text) {
    CAPTURE(text);
    CHECK_THROWS_WITH_AS(options_of(std::move(arguments)), doctest::Contains(text), usage_error);
  };
  refuses({"--stpes", "3"}, "unknown option --stpes");
  refuses({"--steps"}, "--steps needs a value");
  refuses({"--steps", "3x"}, "--steps needs a number; it was given '3x'");
  refuses({"--steps", "0"}, "--steps 0 must be at least 1");
  refuses({"--dtype", "f16"}, "valid: f64 f32");
  refuses({"--mesh", "pp1-dp4-cp1-ep1", "--batch", "6"}, "not divisible by dp=4; valid: 4 8");
  refuses({"--mesh", "pp1-dp2-cp1-ep1", "--batch", "12", "--micro-batch", "4"}, "valid: 1 2 3 6");
  refuses({"--heads", "6", "--kv-heads", "4"}, "valid: 1 2 3 6");
  refuses({"--top-k", "17"}, "valid: 1 to 16");
  refuses({"--head-dim", "7"}, "valid: 2 4 6");
  refuses({"--mesh", "pp2-dp4-cp1-ep1"}, "valid pp: 1");
  refuses({"--fail-rank", "1"}, "valid: 0 to 0");
  const auto bad_mesh = [](std::vector<const char*> arguments, const char* text) {
    CAPTURE(text);
    CHECK_THROWS_WITH_AS(options_of(std::move(arguments)), doctest::Contains(text), pleat::mesh_error);
  };
  bad_mesh({"--mesh", "pp1-dp4-cp1-ep3"}, "pleat[M02]");
  bad_mesh({"--mesh", "pp1-dp4-cp1-ep4", "--experts", "6"}, "pleat[M06]");
  bad_mesh({"--mesh", "pp1-dp1-cp4-ep1", "--seq", "100"}, "pleat[M07]");
}
