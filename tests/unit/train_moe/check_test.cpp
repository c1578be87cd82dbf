// The check itself: what counts as a difference, and what as a tie.
#include <cmath>
#include <limits>
#include <set>

#include <doctest/doctest.h>

#include "small_run.hpp"

using namespace train_moe;

TEST_CASE("differences are relative, 0 must be met exactly, NaN never passes") {
  Differences d;
  d.compare("w", {1, 2, 2}, {1, 2, 2});
  CHECK(d.within(0));
  d.compare("w", {1, 2, 2 + 3e-6}, {1, 2, 2});
  CHECK(d.gradients == doctest::Approx(1e-6));
  CHECK(d.worst_gradient == "w");
  d.compare("w", {0, 0}, {0, 0});
  CHECK(d.gradients == doctest::Approx(1e-6));
  Differences zero;
  zero.compare("w", {0, 1e-300}, {0, 0});
  CHECK_FALSE(zero.within(1));
  Differences nan;
  nan.compare("w", {std::nan("")}, {1});
  CHECK_FALSE(nan.within(1));
  Differences floored;
  floored.compare("w", {3e-16}, {1e-16}, 1e-7);  // rounding noise of a gradient that is 0
  CHECK(floored.within(1e-8));
  floored.compare("w", {2e-7}, {1e-7}, 1e-7);
  CHECK_FALSE(floored.within(0.5));
  Differences zero_with_floor;
  zero_with_floor.compare("w", {3e-16}, {0}, 1e-7);  // the same where the reference rounds to 0
  CHECK(zero_with_floor.within(1e-8));
  zero_with_floor.compare("w", {1e-6}, {0}, 1e-7);
  CHECK_FALSE(zero_with_floor.within(1));
  Differences report;
  report.compare({.loss = 2, .balance = 1, .norm = 3}, {.loss = 1, .balance = 1, .norm = 4});
  CHECK(report.loss == 1);
  CHECK(report.norm == 0.25);
}

TEST_CASE("the reference follows the mesh at ties only") {
  const Options o = options_of({"--experts", "4", "--top-k", "2", "--seq", "4", "--layers", "1"});
  RoutingRecord record(o, 1);
  MicroBatch batch;
  batch.tokens = {0, 0, 0};
  batch.global = {0, 1, 2};
  const std::vector<std::int32_t> mesh = {3, 1, /* a tie */ 2, 0, /* none */ 3, 0};
  record.observe(0, batch, mesh.data());
  // The first token agrees in another order, the second's experts 1 and 2 are near, the third's 1 and 3 are not.
  std::vector<double> logits = {0, 5, 1, 5.5, /**/ 3, 2 + 1e-6, 2, 0, /**/ 3, 2, 0, 1};
  RoutingFollower follower(o, record, 1e-5);
  const std::int32_t* ids = follower.decide(0, batch, pleat::TensorRef{logits.data(), {3, 4}});
  CHECK(std::set<std::int32_t>(ids, ids + 2) == std::set<std::int32_t>{1, 3});
  CHECK(std::set<std::int32_t>(ids + 2, ids + 4) == std::set<std::int32_t>{0, 2});
  CHECK(std::set<std::int32_t>(ids + 4, ids + 6) == std::set<std::int32_t>{0, 1});
  CHECK(follower.ties() == 1);

  // Where tokens take experts in turn, the turn is the mesh's.
  Options forced = o;
  forced.force_balance = true;
  RoutingFollower in_turn(forced, record, 0);
  ids = in_turn.decide(0, batch, pleat::TensorRef{logits.data(), {3, 4}});
  CHECK(std::equal(mesh.begin(), mesh.end(), ids));
  CHECK(in_turn.ties() == 0);

  // The digest tells who took what, not in which order or on which rank.
  const std::uint64_t digest = record.take_digest(0);
  CHECK(digest != 0);
  CHECK(record.take_digest(0) == 0);
  MicroBatch first = batch, rest = batch;
  first.tokens = {0};
  rest.tokens = {0, 0};
  rest.global = {1, 2};
  const std::vector<std::int32_t> swapped = {1, 3, 0, 2, 3, 0};
  record.observe(0, rest, swapped.data() + 2);
  record.observe(0, first, swapped.data());
  CHECK(record.take_digest(0) == digest);
  const std::vector<std::int32_t> other = {3, 1, 2, 1, 3, 0};
  record.observe(0, batch, other.data());
  CHECK(record.take_digest(0) != digest);
}
