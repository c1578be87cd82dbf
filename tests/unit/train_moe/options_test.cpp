// Bad input is refused with the values and the valid choices.
#include <doctest/doctest.h>

#include <pleat/checkpoint/folder.hpp>

#include "flops.hpp"
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
  refuses({"--steps", "0"}, "--steps 0 is out of range; valid: 1 to 2147483647");
  refuses({"--dtype", "f16"}, "valid: f64 f32 bf16");
  refuses({"--mesh", "pp1-dp4-cp1-ep1", "--batch", "6"}, "not divisible by dp=4; valid: 4 8");
  refuses({"--mesh", "pp1-dp2-cp1-ep1", "--batch", "12", "--micro-batch", "4"}, "valid: 1 2 3 6");
  refuses({"--heads", "6", "--kv-heads", "4"}, "valid: 1 2 3 6");
  refuses({"--top-k", "17"}, "valid: 1 to 16");
  refuses({"--head-dim", "7"}, "valid: 2 4 6");
  refuses({"--mesh", "pp4-dp1-cp1-ep1"}, "4 layers cannot fill 8 stages");
  refuses({"--mesh", "pp2-dp4-cp1-ep1", "--schedule", "dualpipev"}, "needs at least 4 micro-batches, and got 1");
  refuses({"--schedule", "gpipe"}, "no schedule is called \"gpipe\"; valid: 1f1b 1f1b-pairs zb-v dualpipev");
  refuses({"--preset", "gpt"}, "--preset gpt is unknown; valid: qwen3-30b-a3b deepseek-v2-lite");
  refuses({"--packed", "--balance", "sequence"}, "valid: none micro global");
  refuses({"--ragged", "--seq", "36"}, "valid: 8 16");
  refuses({"--rope-dim", "3"}, "is odd");
  refuses({"--dense-layers", "5"}, "valid: 0 to 4");
  refuses({"--every", "2"}, "name its folder");
  refuses({"--mesh", "pp1-dp513-cp1-ep1"}, "513 ranks; each is a thread of this program: valid: up to 512");
  refuses({"--fail-rank", "1"}, "valid: 0 to 0");
  refuses({"--fail-rank", "-2"}, "--fail-rank -2 is out of range; valid: -1 to 511");
  refuses({"--fail-rank", "0", "--steps", "3", "--fail-step", "4"}, "--fail-step 4 is no step; valid: 1 to 3");
  refuses({"--fail-rank", "0", "--fail-step", "0"}, "--fail-step 0 is out of range");
  const auto bad_mesh = [](std::vector<const char*> arguments, const char* text) {
    CAPTURE(text);
    CHECK_THROWS_WITH_AS(options_of(std::move(arguments)), doctest::Contains(text), pleat::mesh_error);
  };
  bad_mesh({"--mesh", "pp1-dp4-cp1-ep3"}, "pleat[M02]");
  bad_mesh({"--mesh", "pp1-dp4-cp1-ep4", "--experts", "6"}, "pleat[M06]");
  bad_mesh({"--mesh", "pp1-dp1-cp4-ep1", "--seq", "100"}, "pleat[M07]");
}

TEST_CASE("numbers out of range name the flag, the value and what is valid") {
  const auto refuses = [](const char* flag, const char* value, const std::string& valid) {
    const std::string text = std::string(flag) + " " + value + " is out of range; valid: " + valid;
    CAPTURE(text);
    CHECK_THROWS_WITH_AS(options_of({flag, value}), text.c_str(), usage_error);
  };
  for (const char* flag : {"--lr", "--warmup-from", "--clip", "--weight-decay", "--balance-alpha"}) {
    for (const char* value : {"nan", "-nan", "inf", "-inf", "-1", "-1e-9", "1e999"}) {
      refuses(flag, value, "a finite number of at least 0");
    }
    CHECK_NOTHROW(options_of({flag, "0"}));
    CHECK_NOTHROW(options_of({flag, "1e-3"}));
  }
  const std::pair<const char*, const char*> sizes[] = {
      {"--steps", "1 to 2147483647"},    {"--seq", "1 to 1048576"},   {"--batch", "1 to 1048576"},
      {"--micro-batch", "1 to 1048576"}, {"--layers", "1 to 1024"},   {"--hidden", "1 to 65536"},
      {"--heads", "1 to 4096"},          {"--kv-heads", "1 to 4096"}, {"--head-dim", "2 to 1024"},
      {"--experts", "1 to 4096"},        {"--top-k", "1 to 4096"},    {"--inner", "1 to 65536"},
      {"--warmup", "0 to 2147483647"},   {"--prefetch", "0 to 4096"}};
  for (const auto& [flag, valid] : sizes) {
    refuses(flag, "99999999999", valid);
    refuses(flag, "-1", valid);
    if (std::string(valid).find("2147483647") == std::string::npos) refuses(flag, "2147483647", valid);
  }
  refuses("--head-dim", "1026", "2 to 1024");
  refuses("--seed", "18446744073709551616", "0 to 18446744073709551615");
  CHECK(options_of({"--head-dim", "1024"}).model.head_dim == 1024);
  CHECK(options_of({"--hidden", "65536"}).model.heads == 4096);
}

TEST_CASE("batches: products stay in range, and a text names only what was given") {
  const auto text_of = [](std::vector<const char*> arguments) -> std::string {
    try {
      options_of(std::move(arguments));
    } catch (const usage_error& e) {
      return e.what();
    }
    return {};
  };
  CHECK(text_of({"--mesh", "pp1-dp4-cp1-ep1", "--micro-batch", "1048576", "--seq", "1048576"}) ==
        "a step of 4194304 sequences of 1048576 tokens has 4398046511104 tokens; valid: up to 1073741824");
  CHECK(text_of({"--mesh", "pp1-dp4-cp1-ep1", "--batch", "6"}).find("--micro-batch") == std::string::npos);
  CHECK(text_of({"--mesh", "pp1-dp4-cp1-ep1", "--micro-batch", "3"}).empty());
}

TEST_CASE("one rank takes any sequence, as ring attention does; more need whole chunks") {
  CHECK(options_of({"--seq", "1"}).sequence == 1);
  CHECK(options_of({"--mesh", "pp1-dp2-cp1-ep1", "--seq", "7"}).sequence == 7);
  CHECK_THROWS_WITH_AS(options_of({"--mesh", "pp1-dp1-cp2-ep1", "--seq", "6"}), doctest::Contains("2*cp=4"),
                       pleat::mesh_error);
}

TEST_CASE("packed sequences have room for a target") {
  for (const char* sequence : {"1", "2", "3"}) {
    CHECK_THROWS_WITH_AS(options_of({"--packed", "--seq", sequence}), doctest::Contains("valid: 4 or more"),
                         usage_error);
  }
  CHECK(options_of({"--packed", "--seq", "4"}).sequence == 4);
}

TEST_CASE("checkpoints that are there: what a run would save again, or has done, is refused before its first step") {
  namespace ck = pleat::checkpoint;
  const std::string folder = "train_moe_options_checkpoints";
  const auto with = [&](std::vector<const char*> arguments) {
    for (const char* more : {"--save", folder.c_str()}) arguments.push_back(more);
    return arguments;
  };
  const auto refuses = [](std::vector<const char*> arguments, const char* text) {
    CAPTURE(text);
    CHECK_THROWS_WITH_AS(options_of(std::move(arguments)), doctest::Contains(text), usage_error);
  };
  CHECK_NOTHROW(options_of(with({"--steps", "4"})));
  ck::make_folder(folder);
  ck::make_folder(ck::step_folder(folder, 4));
  refuses(with({"--steps", "4"}), "step-000000004, which this run would save");
  refuses(with({"--steps", "6", "--every", "2"}), "step-000000004, which this run would save");
  CHECK_NOTHROW(options_of(with({"--steps", "6"})));
  CHECK_NOTHROW(options_of(with({"--steps", "6", "--every", "3"})));
  CHECK_NOTHROW(options_of(with({"--steps", "3"})));
  // A run that goes on from it.
  const char* const load = folder.c_str();
  CHECK_NOTHROW(options_of(with({"--steps", "6", "--every", "2", "--load", load})));
  CHECK_NOTHROW(options_of({"--steps", "5", "--load", load}));
  CHECK_NOTHROW(options_of({"--steps", "4", "--load", load, "--save", "other"}));  // for another mesh
  refuses({"--steps", "4", "--load", load}, "has step 4, so no step is left of --steps 4; valid: 5 or more");
  refuses({"--steps", "2", "--load", load}, "has step 4, so no step is left of --steps 2; valid: 5 or more");
  refuses({"--steps", "2", "--load", load, "--save", "other"}, "no step is left of --steps 2; valid: 4 or more");
  refuses(with({"--steps", "4", "--load", load}), "step-000000004, which this run would save");
  ck::remove_folder(ck::step_folder(folder, 4));
  ck::remove_folder(folder);
}

TEST_CASE("a schedule has the names of the library, and one more") {
  using pleat::pipeline::Kind;
  for (const char* name : {"zbv", "zb-v"})
    CHECK(options_of({"--schedule", name, "--layers", "4"}).kind() == Kind::zb_v);
}

TEST_CASE("what a step reads, in words") {
  CHECK(work_text(options_of({"--seq", "1"})) ==
        "1 rank, 1 micro-batch of 1 sequence of 1 token a step on each of 1 data rank");
  CHECK(work_text(options_of({"--mesh", "pp1-dp2-cp1-ep1", "--batch", "12", "--micro-batch", "2"})) ==
        "2 ranks, 3 micro-batches of 2 sequences of 128 tokens a step on each of 2 data ranks");
}

TEST_CASE("a preset has the sizes of its model, and flags change them wherever they stand") {
  const ModelShape qwen = options_of({"--preset", "qwen3-30b-a3b"}).model;
  CHECK(qwen.queries() == 4096);
  CHECK(qwen.keys() == 512);
  CHECK(qwen.mlp_inner(0) == 0);
  const Options o = options_of({"--layers", "8", "--preset", "deepseek-v2-lite"});
  CHECK(o.model.layers == 8);
  CHECK(o.model.hidden == 2048);
  CHECK(o.model.queries() == 16 * 192);
  CHECK(o.model.attended() == 2048);
  CHECK(o.model.latents().width() == 576);
  CHECK(o.model.mlp_inner(0) == 10944);
  CHECK(o.model.mlp_inner(1) == 2816);
  CHECK_FALSE(o.model.renormalize);
  CHECK(o.balance == pleat::moe::BalanceScope::sequence);
}

TEST_CASE("the model's operations are counted as papers count them") {
  // 7 layers of qwen3: of each 18.9 million parameters of attention, 0.26 of the router, 8 experts of 4.7; and the
  // head.
  const ModelShape qwen = options_of({"--preset", "qwen3-30b-a3b", "--layers", "7"}).model;
  const double layer = 2048.0 * (2 * 4096 + 2 * 512 + 128 + 8 * 3 * 768);
  CHECK(training_flops(qwen, 1, 0) == 6 * (7 * layer + 2048.0 * 151936));
  CHECK(training_flops(qwen, 0, 1) == 6 * 7 * 2 * 4096.0);
  // Latents of 512 and 64 rotated numbers; the first layer is dense, the second has 6 routed experts and 2 shared ones.
  const ModelShape deepseek = options_of({"--preset", "deepseek-v2-lite", "--layers", "2"}).model;
  const double attention = 2048.0 * (16 * 192 + 576) + 512.0 * 16 * (128 + 128) + 16 * 128 * 2048.0;
  const double mlps = 3 * 2048.0 * (10944 + (6 + 2) * 1408) + 2048.0 * 64;
  CHECK(training_flops(deepseek, 1, 0) == 6 * (2 * attention + mlps + 2048.0 * 102400));
  CHECK(training_flops(deepseek, 0, 1) == 6 * 2 * 16.0 * (192 + 128));
}
