// The simulator: when each operation of a schedule runs, how much memory is live, and whether it ends at all.
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>

#include <pleat/pipeline/schedule.hpp>

namespace pleat::inline v0::pipeline {

/// How long operations take on one chunk, in any unit.
struct Costs {
  double forward = 1;
  double input_backward = 1;
  double weight_backward = 1;
  /// A pair run together; what it is below the sum of its parts is what overlap hides.
  double overlapped = 3;

  constexpr double operator()(int /*rank*/, const Op& op) const {
    switch (op.kind) {
      case OpKind::forward:
        return forward;
      case OpKind::backward:
        return input_backward + weight_backward;
      case OpKind::input_backward:
        return input_backward;
      case OpKind::weight_backward:
        return weight_backward;
      case OpKind::overlapped:
        return overlapped;
    }
    return 0;
  }
};

/// When transfers, which take no time, happen.
/// - instant: as soon as their tensor is made; batches are not looked at
/// - blocking: a rank enters a batch after the ops before it, and computes nothing until all of it is done: host ranks
/// - streamed: as blocking, but compute waits only for what it reads, as with a stream of transfers on a device
enum class TransferModel : unsigned char { instant, blocking, streamed };

/// When an op runs.
struct Span {
  double start = 0;
  double finish = 0;
};
/// One rank of a run. Live counts activations from forward to the end of the pass that makes the input's gradient;
/// held counts them to the end of the pass that makes the weights'.
struct RankTimeline {
  std::vector<Span> spans = {};  ///< [ops]
  double busy = 0;
  int peak_live = 0;
  int peak_held = 0;
  int peak_deferred = 0;  ///< weight gradients put off
};
/// A run of a schedule, simulated or measured.
struct Timeline {
  std::vector<RankTimeline> ranks;
  double makespan = 0;

  /// Time that a rank waits; the most that one does; the most that is live on one.
  PLEAT_VECTOR_CONSTEXPR double bubble(int rank) const { return makespan - ranks[static_cast<std::size_t>(rank)].busy; }
  PLEAT_VECTOR_CONSTEXPR double max_bubble() const {
    double most = 0;
    for (std::size_t r = 0; r < ranks.size(); ++r) most = std::max(most, bubble(static_cast<int>(r)));
    return most;
  }
  PLEAT_VECTOR_CONSTEXPR int peak_live() const {
    int most = 0;
    for (const RankTimeline& rank : ranks) most = std::max(most, rank.peak_live);
    return most;
  }
};

namespace detail {

/// Counts what a rank's operations hold; also checks that each part is there exactly once (P06).
PLEAT_VECTOR_CONSTEXPR void count_memory(const Schedule& schedule, int rank, RankTimeline& timeline) {
  const auto micro_batches = static_cast<std::size_t>(schedule.micro_batches);
  const auto size = static_cast<std::size_t>(schedule.placement.chunks_per_rank) * micro_batches;
  std::vector<int> seen(3 * size, 0);
  const auto see = [&](std::size_t pass, const Op& op, const Part& part) {
    const bool is_known = part.chunk >= 0 && part.chunk < schedule.placement.chunks_per_rank && part.micro_batch >= 0 &&
                          part.micro_batch < schedule.micro_batches;
    const auto place =
        static_cast<std::size_t>(part.chunk) * micro_batches + static_cast<std::size_t>(part.micro_batch);
    if (!is_known || seen[pass * size + place]++ != 0) {
      fail<shape_error>("pleat[P06]: rank ", rank, " computes ", op,
                        is_known ? " a second time" : ", which is none of its chunks and micro-batches",
                        "; every forward, input gradient and weight gradient occurs once");
    }
  };
  int live = 0, held = 0, deferred = 0;
  std::size_t parts = 0;
  for (const Op& op : schedule.programs[static_cast<std::size_t>(rank)].ops) {
    if (op.has_forward()) see(0, op, op.forward), ++live, ++held, ++parts;
    timeline.peak_live = std::max(timeline.peak_live, live);
    timeline.peak_held = std::max(timeline.peak_held, held);
    if (op.has_input_gradient()) see(1, op, op.backward), --live, ++deferred, ++parts;
    if (op.has_weight_gradient()) see(2, op, op.backward), --held, --deferred, ++parts;
    timeline.peak_deferred = std::max(timeline.peak_deferred, deferred);
  }
  if (parts != 3 * size) {
    fail<shape_error>("pleat[P06]: rank ", rank, " computes ", parts, " of the ", 3 * size,
                      " passes of its chunks; every forward, input gradient and weight gradient occurs once");
  }
}

/// Plays the programs of all ranks. Ops of a rank run in order and its batches run in order; what each waits for is
/// looked up again until nothing moves.
template <class Cost>
class Simulator {
 public:
  PLEAT_VECTOR_CONSTEXPR Simulator(const Schedule& schedule, const Cost& cost, TransferModel model)
      : schedule_(schedule),
        cost_(cost),
        model_(model),
        ranks_(schedule.programs.size()),
        ready_(static_cast<std::size_t>(schedule.boundaries()), unknown),
        arrived_(ready_),
        lanes_(ranks_ * ranks_, Lane{}) {
    for (std::size_t r = 0; r < ranks_; ++r) {
      states_.push_back({std::vector<double>(passes(), unknown), std::vector<double>(passes(), unknown)});
      timeline_.ranks.push_back({.spans = std::vector<Span>(program(r).ops.size(), Span{})});
      count_memory(schedule, static_cast<int>(r), timeline_.ranks[r]);
    }
  }

  PLEAT_VECTOR_CONSTEXPR Timeline run() {
    for (bool moved = true; moved;) {
      moved = false;
      for (std::size_t r = 0; r < ranks_; ++r) {
        while (advance_batch(r) || advance_op(r)) moved = true;
      }
    }
    for (std::size_t r = 0; r < ranks_; ++r) check_end(r);
    for (const RankTimeline& rank : timeline_.ranks) {
      if (!rank.spans.empty()) timeline_.makespan = std::max(timeline_.makespan, rank.spans.back().finish);
    }
    return std::move(timeline_);
  }

 private:
  static constexpr double unknown = -1;
  struct RankState {
    std::vector<double> forward_done = {};         // [passes]
    std::vector<double> input_gradient_done = {};  // [passes]
    std::size_t op = 0;                            // the next one
    std::size_t batch = 0;                         // the next one
    double op_free = 0;                            // when the last op ended
    double batch_free = 0;                         // when the last batch ended
    bool is_posted = false;                        // whether the next batch has been entered
  };
  /// Of one direction between two ranks: the k-th send meets the k-th receive.
  struct Lane {
    struct Post {
      Boundary what;
      double time;
    };
    std::vector<Post> sends, receives;
  };

  PLEAT_VECTOR_CONSTEXPR std::size_t passes() const {
    return static_cast<std::size_t>(schedule_.placement.chunks_per_rank) *
           static_cast<std::size_t>(schedule_.micro_batches);
  }
  PLEAT_VECTOR_CONSTEXPR std::size_t pass(const Part& part) const {
    return static_cast<std::size_t>(part.chunk) * static_cast<std::size_t>(schedule_.micro_batches) +
           static_cast<std::size_t>(part.micro_batch);
  }
  PLEAT_VECTOR_CONSTEXPR const Program& program(std::size_t r) const { return schedule_.programs[r]; }
  PLEAT_VECTOR_CONSTEXPR std::size_t index(const Boundary& what) const {
    return static_cast<std::size_t>(schedule_.index(what));
  }
  PLEAT_VECTOR_CONSTEXPR Lane& lane(std::size_t rank, const Transfer& t) {
    const auto peer = static_cast<std::size_t>(t.peer);
    return lanes_[t.is_send ? rank * ranks_ + peer : peer * ranks_ + rank];
  }

  PLEAT_VECTOR_CONSTEXPR bool batch_is_due(std::size_t r) const {
    const RankState& s = states_[r];
    const auto& batches = program(r).batches;
    return s.batch < batches.size() && batches[s.batch].before <= static_cast<int>(s.op);
  }
  PLEAT_VECTOR_CONSTEXPR bool advance_batch(std::size_t r) {
    RankState& s = states_[r];
    if (model_ == TransferModel::instant || !batch_is_due(r)) return false;
    const Batch& batch = program(r).batches[s.batch];
    if (!s.is_posted) post(r, batch);
    double finish = s.batch_free;
    for (const Transfer& t : batch.transfers) {
      const Lane& l = lane(r, t);
      const auto& mine = t.is_send ? l.sends : l.receives;
      const auto& theirs = t.is_send ? l.receives : l.sends;
      std::size_t k = 0;  // the tensor's place in the lane
      while (!(mine[k].what == t.what)) ++k;
      if (k >= theirs.size()) return false;
      if (!(theirs[k].what == t.what)) {
        fail<shape_error>("pleat[P05]: transfer ", k, " between ranks ", r, " and ", t.peer, " is ", t.what,
                          " for one and ", theirs[k].what, " for the other; both must list their transfers alike");
      }
      finish = std::max(finish, theirs[k].time);
    }
    for (const Transfer& t : batch.transfers) {
      if (!t.is_send) arrived_[index(t.what)] = finish;
    }
    s.batch_free = finish;
    s.is_posted = false;
    ++s.batch;
    return true;
  }
  PLEAT_VECTOR_CONSTEXPR void post(std::size_t r, const Batch& batch) {
    RankState& s = states_[r];
    for (const Transfer& t : batch.transfers) check_transfer(static_cast<int>(r), batch, t);
    if (batch.before > 0) {
      s.batch_free =
          std::max(s.batch_free, timeline_.ranks[r].spans[static_cast<std::size_t>(batch.before) - 1].finish);
    }
    for (const Transfer& t : batch.transfers) {
      (t.is_send ? lane(r, t).sends : lane(r, t).receives).push_back({t.what, s.batch_free});
    }
    s.is_posted = true;
  }
  PLEAT_VECTOR_CONSTEXPR void check_transfer(int rank, const Batch& batch, const Transfer& t) const {
    const Placement& p = schedule_.placement;
    const bool is_known = p.travels(t.what) && t.what.micro_batch >= 0 && t.what.micro_batch < schedule_.micro_batches;
    const int from = is_known ? p.rank_of(t.what.stage) : -1;
    const int to = is_known ? p.rank_of(p.consumer(t.what)) : -1;
    if (!is_known || (t.is_send ? from : to) != rank || (t.is_send ? to : from) != t.peer ||
        (t.is_send && ready_[index(t.what)] == unknown)) {
      fail<shape_error>("pleat[P05]: rank ", rank, t.is_send ? " cannot send " : " cannot receive ", t.what,
                        t.is_send ? " to" : " from", " rank ", t.peer, " before its op ", batch.before,
                        "; a tensor is sent once it is made, from its maker's rank to its user's");
    }
  }

  /// When the op's inputs are there; `unknown` while one is missing.
  PLEAT_VECTOR_CONSTEXPR double inputs_ready(std::size_t r, const Op& op) const {
    const RankState& s = states_[r];
    double time = 0;
    bool all = true;
    const auto need = [&](double at) {
      all = all && at != unknown;
      time = std::max(time, at);
    };
    for_each_input(schedule_.placement, static_cast<int>(r), op, [&](const Boundary& what) {
      const bool waits = model_ != TransferModel::instant && schedule_.placement.travels(what);
      need((waits ? arrived_ : ready_)[index(what)]);
    });
    if (op.has_input_gradient()) need(s.forward_done[pass(op.backward)]);
    if (op.kind == OpKind::weight_backward) need(s.input_gradient_done[pass(op.backward)]);
    return all ? time : unknown;
  }
  PLEAT_VECTOR_CONSTEXPR bool advance_op(std::size_t r) {
    RankState& s = states_[r];
    if (s.op == program(r).ops.size()) return false;
    if (model_ == TransferModel::blocking && batch_is_due(r)) return false;
    const Op& op = program(r).ops[s.op];
    const double inputs = inputs_ready(r, op);
    if (inputs == unknown) return false;
    const double cost = cost_(static_cast<int>(r), op);
    if (!(cost >= 0)) fail<shape_error>("pleat[P10]: the time of ", op, " on rank ", r, " is negative or no number");
    const double blocked = model_ == TransferModel::blocking ? s.batch_free : 0;
    const double start = std::max({inputs, s.op_free, blocked}), finish = start + cost;
    timeline_.ranks[r].spans[s.op] = {start, finish};
    timeline_.ranks[r].busy += cost;
    for_each_output(schedule_.placement, static_cast<int>(r), op,
                    [&](const Boundary& what) { ready_[index(what)] = finish; });
    if (op.has_forward()) s.forward_done[pass(op.forward)] = finish;
    if (op.has_input_gradient()) s.input_gradient_done[pass(op.backward)] = finish;
    s.op_free = finish;
    ++s.op;
    return true;
  }

  PLEAT_VECTOR_CONSTEXPR void check_end(std::size_t r) const {
    const RankState& s = states_[r];
    const auto& ops = program(r).ops;
    const bool batches_left = model_ != TransferModel::instant && s.batch < program(r).batches.size();
    if (s.op == ops.size() && !batches_left) return;
    if (batches_left && batch_is_due(r)) {
      fail<shape_error>("pleat[P05]: a deadlock: rank ", r, " waits before its op ", s.op, " of ", ops.size(),
                        ", in a batch that its peers never enter; it begins with ",
                        program(r).batches[s.batch].transfers.front().what);
    }
    if (s.op == ops.size()) {
      fail<shape_error>("pleat[P05]: rank ", r, " has a batch before op ", program(r).batches[s.batch].before, " of ",
                        ops.size());
    }
    fail<shape_error>("pleat[P05]: a deadlock: rank ", r, " waits before its op ", s.op, " of ", ops.size(), ", ",
                      ops[s.op], ", for an input that is never there");
  }

  const Schedule& schedule_;
  const Cost& cost_;
  TransferModel model_;
  std::size_t ranks_;
  std::vector<double> ready_;    // by boundary: when it was made
  std::vector<double> arrived_;  // and when its receive was done
  std::vector<Lane> lanes_;
  std::vector<RankState> states_;
  Timeline timeline_;
};

}  // namespace detail

/// Plays `schedule` and returns when everything runs. `cost(rank, op)` is the time of an op, as `Costs` has it. Errors:
/// shape_error P05 when it cannot end (the text names a rank that waits, and where) or when transfers do not match, P06
/// when a pass is missing or there twice, P10 for a time that is none.
template <class Cost = Costs>
PLEAT_VECTOR_CONSTEXPR Timeline simulate(const Schedule& schedule, const Cost& cost = {},
                                         TransferModel model = TransferModel::blocking) {
  return detail::Simulator<Cost>(schedule, cost, model).run();
}

/// A run as it was measured: `spans` [ranks][ops], in any one unit and from any one zero. Errors: shape_error P10 when
/// they are not those of the schedule.
PLEAT_VECTOR_CONSTEXPR Timeline measured(const Schedule& schedule, std::vector<std::vector<Span>> spans) {
  if (spans.size() != schedule.programs.size()) {
    fail<shape_error>("pleat[P10]: times of ", spans.size(), " ranks for a schedule of ", schedule.programs.size());
  }
  double first = spans.empty() || spans[0].empty() ? 0 : spans[0].front().start;
  for (std::size_t r = 0; r < spans.size(); ++r) {
    if (spans[r].size() != schedule.programs[r].ops.size()) {
      fail<shape_error>("pleat[P10]: times of ", spans[r].size(), " ops for rank ", r, ", which has ",
                        schedule.programs[r].ops.size());
    }
    if (!spans[r].empty()) first = std::min(first, spans[r].front().start);
  }
  Timeline timeline;
  for (std::size_t r = 0; r < spans.size(); ++r) {
    RankTimeline rank{.spans = std::move(spans[r])};
    double last = first;
    for (Span& span : rank.spans) {
      if (!(span.start >= last && span.finish >= span.start)) {
        fail<shape_error>("pleat[P10]: times of rank ", r, " overlap, run backwards or are no numbers");
      }
      last = span.finish;
      span = {span.start - first, span.finish - first};
      rank.busy += span.finish - span.start;
      timeline.makespan = std::max(timeline.makespan, span.finish);
    }
    detail::count_memory(schedule, static_cast<int>(r), rank);
    timeline.ranks.push_back(std::move(rank));
  }
  return timeline;
}

}  // namespace pleat::inline v0::pipeline
