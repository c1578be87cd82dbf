// From orders of computation to schedules: where each rank exchanges which tensors, so that nothing can deadlock.
#pragma once

#include <algorithm>
#include <utility>

#include <pleat/pipeline/orders.hpp>
#include <pleat/pipeline/simulate.hpp>

namespace pleat::inline v0::pipeline {

namespace detail {

/// A transfer with its moment in the run without transfers, and the ranks it joins.
struct TimedTransfer {
  double time = 0;
  Boundary what;
  int from = 0;
  int to = 0;
};

/// The first moment from `start` on at which `rank` is between two ops.
PLEAT_VECTOR_CONSTEXPR double next_gap(const RankTimeline& rank, double start) {
  for (const Span& span : rank.spans) {
    if (span.start >= start) break;
    if (span.finish > start) return span.finish;
  }
  return start;
}
PLEAT_VECTOR_CONSTEXPR int ops_before(const RankTimeline& rank, double time) {
  int ops = 0;
  while (ops < static_cast<int>(rank.spans.size()) && rank.spans[static_cast<std::size_t>(ops)].start < time) ++ops;
  return ops;
}

/// A moment between making and use at which both ranks are between ops; where there is none, the one that holds up one
/// rank for the least time.
PLEAT_VECTOR_CONSTEXPR double meeting_time(const RankTimeline& from, const RankTimeline& to, double made, double used) {
  for (double time = made; time <= used;) {
    const double next = std::max(next_gap(from, time), next_gap(to, time));
    if (next == time) return time;
    time = next;
  }
  const double gap = next_gap(to, made);
  return gap - made <= next_gap(from, gap) - gap ? made : gap;
}

/// The run that transfers are planned in. Pairs that hide all they can: moments that suit them suit slower ones too.
inline constexpr Costs planning_costs{.overlapped = 2};

}  // namespace detail

/// The schedule of `orders` [ranks] with its transfers. Each transfer gets one moment in the run without transfers,
/// after its tensor was made and before it is used; each rank meets it in the order of these moments. So all ranks
/// follow one order of everything, and the first thing in it that is not done can always be done: no deadlock, whatever
/// things really take. Transfers without an op in between are one batch: they are entered sooner, never later. Ops must
/// have positive costs. Errors: shape_error P05, P06 when the orders themselves are impossible.
template <class Cost = Costs>
PLEAT_VECTOR_CONSTEXPR Schedule with_transfers(Placement placement, int micro_batches, std::vector<Order> orders,
                                               const char* name, const Cost& cost = detail::planning_costs) {
  Schedule schedule{placement, micro_batches, {}, name};
  for (Order& order : orders) schedule.programs.push_back({std::move(order), {}});
  const Timeline run = simulate(schedule, cost, TransferModel::instant);
  const auto at = [](auto& list, int i) -> auto& {
    return list[static_cast<std::size_t>(i)];
  };

  std::vector<double> made(static_cast<std::size_t>(schedule.boundaries()), 0.0);
  const auto for_each_op = [&](auto&& f) {
    for (int r = 0; r < placement.ranks; ++r) {
      const Order& ops = at(schedule.programs, r).ops;
      for (int i = 0; i < static_cast<int>(ops.size()); ++i) f(r, at(ops, i), at(at(run.ranks, r).spans, i));
    }
  };
  for_each_op([&](int r, const Op& op, const Span& span) {
    for_each_output(placement, r, op, [&](const Boundary& what) { at(made, schedule.index(what)) = span.finish; });
  });
  std::vector<detail::TimedTransfer> transfers;
  for_each_op([&](int r, const Op& op, const Span& span) {
    for_each_input(placement, r, op, [&](const Boundary& what) {
      if (!placement.travels(what)) return;
      const int from = placement.rank_of(what.stage);
      const double time =
          detail::meeting_time(at(run.ranks, from), at(run.ranks, r), at(made, schedule.index(what)), span.start);
      transfers.push_back({time, what, from, r});
    });
  });
  std::sort(transfers.begin(), transfers.end(), [&](const auto& a, const auto& b) {
    return a.time != b.time ? a.time < b.time : schedule.index(a.what) < schedule.index(b.what);
  });
  for (const detail::TimedTransfer& t : transfers) {
    const auto add = [&](int rank, int peer, bool is_send) {
      std::vector<Batch>& batches = at(schedule.programs, rank).batches;
      const int before = detail::ops_before(at(run.ranks, rank), t.time);
      if (batches.empty() || batches.back().before != before) batches.push_back({before, {}});
      batches.back().transfers.push_back({t.what, peer, is_send});
    };
    add(t.from, t.to, true);
    add(t.to, t.from, false);
  }
  return schedule;
}

/// The fewest micro-batches that `kind` takes on `ranks` ranks.
constexpr int least_micro_batches(Kind kind, int ranks) {
  return kind == Kind::dualpipe_v ? 2 * ranks : 1;
}

namespace detail {
PLEAT_VECTOR_CONSTEXPR std::vector<Order> orders_of(Kind kind, int ranks, int micro_batches) {
  if (kind == Kind::zb_v) return zb_v(ranks, micro_batches);
  const auto of_rank = kind == Kind::dualpipe_v          ? dualpipe_v
                       : kind == Kind::one_f_one_b_pairs ? one_f_one_b_pairs
                                                         : one_f_one_b;
  std::vector<Order> orders;
  for (int r = 0; r < ranks; ++r) orders.push_back(of_rank(r, ranks, micro_batches));
  return orders;
}
}  // namespace detail

/// The schedule of `kind` for a step of `micro_batches` on `ranks` ranks of a pipeline; pure, and the same on every
/// rank. Errors: shape_error P01 (too few micro-batches), P02 (no ranks), P09 (no kind).
PLEAT_VECTOR_CONSTEXPR Schedule make_schedule(Kind kind, int ranks, int micro_batches) {
  if (*name_of(kind) == '\0') {
    fail<shape_error>("pleat[P09]: no schedule has kind number ", static_cast<int>(kind),
                      "; valid: 1f1b 1f1b-pairs zb-v dualpipev");
  }
  if (ranks < 1) fail<shape_error>("pleat[P02]: a pipeline of ", ranks, " ranks; at least 1 is needed");
  const int least = least_micro_batches(kind, ranks);
  if (micro_batches < least) {
    fail<shape_error>("pleat[P01]: ", name_of(kind), " on ", ranks, " ranks needs at least ", least,
                      " micro-batches, and got ", micro_batches);
  }
  return with_transfers({ranks, chunks_per_rank(kind)}, micro_batches, detail::orders_of(kind, ranks, micro_batches),
                        name_of(kind));
}

}  // namespace pleat::inline v0::pipeline
