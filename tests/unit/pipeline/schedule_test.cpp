// Schedules and the simulator, against expected values in tests/facts.
#include <doctest/doctest.h>
#include <random>
#include <string>

#include <pleat/pipeline.hpp>

#include "support/json.hpp"

using namespace pleat::pipeline;
using testing_support::Json;

static_assert(simulate(make_schedule(Kind::zb_v, 2, 4)).makespan == 25);  // all of it at compile time

namespace {
Costs costs_of(const std::string& name) {
  if (name == "F1_B2_W1_FB3" || name == "equal_no_overlap") return {};
  if (name == "F1_B2_W1_FB2.5" || name == "overlap_FB2.5") return {.overlapped = 2.5};
  if (name == "overlap_FB2") return {.overlapped = 2};
  if (name == "F2_B4_W2_FB5") return {2, 2, 2, 5};
  throw std::runtime_error(name);
}
}  // namespace

TEST_CASE("DualPipeV is the reference op for op, in memory and in time") {
  const Json facts = Json::facts("dualpipev.json");
  for (const auto& member : facts["cases"].object()) {
    CAPTURE(member.first);
    const Json& fact = member.second;
    const Schedule schedule =
        make_schedule(Kind::dualpipe_v, static_cast<int>(fact["P"].integer()), static_cast<int>(fact["M"].integer()));
    for (std::size_t r = 0; r < schedule.programs.size(); ++r) {
      const Order& ops = schedule.programs[r].ops;
      REQUIRE(ops.size() == fact["compute_str"][r].size());
      for (std::size_t i = 0; i < ops.size(); ++i) {
        CHECK(std::string(pleat::message_of(ops[i]).c_str()) == fact["compute_str"][r][i].text());
      }
    }
    for (const auto& timed : fact["sim"].object()) {
      CAPTURE(timed.first);
      const Json& expected = timed.second;
      const Timeline run = simulate(schedule, costs_of(timed.first));
      CHECK(run.makespan == expected["makespan"].number());
      for (std::size_t r = 0; r < run.ranks.size(); ++r) {
        CHECK(run.ranks[r].busy == expected["busy"][r].number());
        CHECK(run.ranks[r].spans.back().finish == expected["finish"][r].number());
        CHECK(run.ranks[r].peak_live == fact["peak_live_act"][r].integer());
        CHECK(run.ranks[r].peak_deferred == fact["peak_deferred_w"][r].integer());
      }
    }
  }
}

TEST_CASE("all schedules reach the expected time, bubble and memory") {
  const Json facts = Json::facts("pipeline_compare.json");
  for (const auto& member : facts["results"].object()) {
    const std::string& name = member.first;
    const int ranks = std::stoi(name.substr(1)), micro_batches = std::stoi(name.substr(name.find('M') + 1));
    for (const auto& [costs_name, fact] : member.second.object()) {
      for (const Kind kind : {Kind::one_f_one_b, Kind::zb_v, Kind::dualpipe_v}) {
        const Json& expected = fact[kind == Kind::zb_v ? "zbv" : name_of(kind)];
        Costs costs = costs_of(costs_name);
        if (kind == Kind::one_f_one_b) costs = {2, 2, 2, 6};
        const int chunk = kind == Kind::one_f_one_b ? 2 : 1;
        const Schedule schedule = make_schedule(kind, ranks, micro_batches);
        CAPTURE(name);
        CAPTURE(name_of(kind));
        for (const auto model : {TransferModel::instant, TransferModel::streamed, TransferModel::blocking}) {
          const Timeline run = simulate(schedule, costs, model);
          CHECK(run.makespan == expected["makespan"].number());
          CHECK(run.max_bubble() == expected["max_bubble"].number());
          CHECK(chunk * run.peak_live() == expected["peak_live_chunks"].integer());
        }
      }
    }
  }
}

TEST_CASE("1F1B in pairs: a steady state of pairs on every rank, without waiting") {
  const Schedule alone = make_schedule(Kind::one_f_one_b_pairs, 1, 3);
  CHECK(draw_text(alone, simulate(alone)).find("0 |F0 F1&B0    F2&B1    B2    |") != std::string::npos);
  for (const int ranks : {1, 2, 4, 8}) {
    const int micro_batches = 4 * ranks;
    const Schedule schedule = make_schedule(Kind::one_f_one_b_pairs, ranks, micro_batches);
    for (const auto model : {TransferModel::instant, TransferModel::streamed, TransferModel::blocking}) {
      const Timeline run = simulate(schedule, Costs{.overlapped = 2}, model);
      for (int r = 0; r < ranks; ++r) {
        const auto& ops = schedule.programs[static_cast<std::size_t>(r)].ops;
        const auto pairs =
            std::count_if(ops.begin(), ops.end(), [](const Op& op) { return op.kind == OpKind::overlapped; });
        CHECK(pairs == micro_batches - (2 * (ranks - r) - 1));
        CHECK(run.ranks[static_cast<std::size_t>(r)].peak_live == 2 * (ranks - r) - 1 + (pairs > 0 ? 1 : 0));
      }
      CHECK(run.max_bubble() == 3 * (ranks - 1));
    }
  }
}

TEST_CASE("schedules of all sizes end, whatever operations take") {
  std::mt19937 random(std::random_device{}());
  std::uniform_real_distribution<double> any(0.01, 5);
  for (const int ranks : {1, 2, 3, 5, 8}) {
    for (const int extra : {0, 1, 5}) {
      for (const Kind kind : all_kinds) {
        const Schedule schedule = make_schedule(kind, ranks, least_micro_batches(kind, ranks) + extra);
        const auto cost = [&](int, const Op&) { return any(random); };
        CHECK(simulate(schedule, cost, TransferModel::blocking).makespan > 0);
        CHECK(simulate(schedule, cost, TransferModel::streamed).makespan > 0);
      }
    }
  }
}

TEST_CASE("ZB-V on two ranks has no bubble but the first micro-batch's way") {
  CHECK(simulate(make_schedule(Kind::zb_v, 2, 4)).makespan == 6 * 4 + 2 - 1);
}

TEST_CASE("layers of stages are balanced, with thin edges") {
  CHECK(layers_of_stages(48, 8) == std::vector(8, 6));
  CHECK(layers_of_stages(27, 8) == std::vector{3, 4, 4, 4, 3, 3, 3, 3});
  CHECK(layers_of_stages(27, 4) == std::vector{7, 7, 7, 6});
  CHECK(layers_of_stages(3, 2) == std::vector{2, 1});
  CHECK(layers_of_stages(5, 3) == std::vector{2, 2, 1});
  CHECK_THROWS_WITH(layers_of_stages(3, 4), doctest::Contains("pleat[P07]: 3 layers cannot fill 4 stages"));
}

TEST_CASE("what cannot be is refused") {
  using doctest::Contains;
  CHECK_THROWS_WITH(make_schedule(Kind::dualpipe_v, 4, 7),
                    "pleat[P01]: dualpipev on 4 ranks needs at least 8 micro-batches, and got 7");
  CHECK_THROWS_WITH(make_schedule(Kind::zb_v, 2, 0), Contains("pleat[P01]"));
  CHECK_THROWS_WITH(make_schedule(Kind::zb_v, 0, 8), Contains("pleat[P02]"));
  CHECK_THROWS_WITH(parse_kind("gpipe"),
                    Contains("pleat[P09]: no schedule is called \"gpipe\"; valid: 1f1b 1f1b-pairs zb-v"));
  CHECK(parse_kind("zb-v") == Kind::zb_v);
  CHECK(parse_kind("zbv") == Kind::zb_v);
  CHECK_THROWS_WITH(make_schedule(static_cast<Kind>(9), 2, 4),
                    "pleat[P09]: no schedule has kind number 9; valid: 1f1b 1f1b-pairs zb-v dualpipev");

  const Schedule good = make_schedule(Kind::one_f_one_b, 2, 3);
  Schedule bad = good;
  bad.programs[1].batches.pop_back();
  CHECK_THROWS_WITH(simulate(bad), Contains("pleat[P05]: a deadlock: rank 0 waits"));
  bad = good;
  bad.programs[1].batches.back().transfers[0].what.micro_batch = 1;
  CHECK_THROWS_WITH(simulate(bad), Contains("[P05]"));
  bad = good;
  for (Batch& batch : bad.programs[0].batches) batch.before = 0;  // before the tensors are made
  CHECK_THROWS_WITH(simulate(bad), Contains("pleat[P05]: rank 0 cannot send"));
  bad = good;
  std::swap(bad.programs[1].ops[0], bad.programs[1].ops[1]);  // backward before forward
  CHECK_THROWS_WITH(simulate(bad), Contains("pleat[P05]: a deadlock: rank"));
  bad = good;
  bad.programs[1].ops[2] = bad.programs[1].ops[0];
  CHECK_THROWS_WITH(simulate(bad), Contains("pleat[P06]: rank 1 computes F0.0 a second time"));
  bad = good;
  bad.programs[1].ops.pop_back();
  CHECK_THROWS_WITH(simulate(bad), Contains("pleat[P06]: rank 1 computes 7 of the 9 passes"));
  CHECK_THROWS_WITH(simulate(good, Costs{.forward = -1}), Contains("[P10]"));
}

TEST_CASE("a measured run has the times that were given") {
  const Schedule schedule = make_schedule(Kind::one_f_one_b, 1, 1);
  const Timeline run = measured(schedule, {{{10, 11}, {14, 16}}});
  CHECK(run.makespan == 6);
  CHECK(run.bubble(0) == 3);
  CHECK(run.peak_live() == 1);
  using doctest::Contains;
  CHECK_THROWS_WITH(measured(schedule, {}), Contains("pleat[P10]: times of 0 ranks"));
  CHECK_THROWS_WITH(measured(schedule, {{{10, 11}}}), Contains("pleat[P10]: times of 1 ops for rank 0, which has 2"));
  CHECK_THROWS_WITH(measured(schedule, {{{10, 11}, {10, 16}}}), Contains("pleat[P10]: times of rank 0 overlap"));
}

TEST_CASE("a drawing shows each op where it runs") {
  const Schedule schedule = make_schedule(Kind::dualpipe_v, 2, 4);
  const Timeline run = simulate(schedule);
  CHECK(draw_text(schedule, run) ==
        "dualpipev: 2 ranks, 4 micro-batches, makespan 26, largest bubble 2, at most 5 live\n"
        "0 |F0  F1  F2  F0' b0' W0' F1' F3&B1'      ....F2'&B0      B2'     ....F3'&B1      B3'     b2  W2  b3  W3  |\n"
        "1 |....F0  F0' F1  F1' F2  B0'     F2'&B0      F3&B1'      F3'&B1      B2'     B2      ....b3' b3  W3' W3  |\n"
        "F forward, B backward, b its input gradient, W its weight gradient; ' the second chunk\n");
  const std::string svg = draw_svg(schedule, run);
  CHECK(svg.substr(0, 4) == "<svg");
  CHECK(svg.find("F3&amp;B1'") != std::string::npos);
}
