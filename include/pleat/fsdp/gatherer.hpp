// The gather half of a Sharder: which unit is in which slot, and what is fetched ahead.
#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include <pleat/fsdp/shard_state.hpp>

namespace pleat::inline v0::fsdp {

/// The order in which units are used, as the schedule gives it, and where the rank stands in it.
class UseOrder {
 public:
  static constexpr std::size_t never = std::numeric_limits<std::size_t>::max();

  void begin(std::span<const int> units) {
    units_.assign(units.begin(), units.end());
    next_ = 0;
  }
  /// Whether `unit` is the next use; if so, moves past it. Without an order every use is right.
  bool advance(int unit) {
    if (units_.empty()) return true;
    if (next_ == units_.size() || units_[next_] != unit) return false;
    ++next_;
    return true;
  }
  /// The use to come next, and the position of a unit's next use.
  std::size_t next() const { return next_; }
  std::size_t next_use(int unit) const {
    for (std::size_t i = next_; i < units_.size(); ++i) {
      if (units_[i] == unit) return i;
    }
    return never;
  }
  std::size_t size() const { return units_.size(); }
  /// Whether all of an order's uses were made.
  bool has_ended() const { return !units_.empty() && next_ == units_.size(); }
  int operator[](std::size_t i) const { return units_[i]; }

 private:
  std::vector<int> units_;
  std::size_t next_ = 0;
};

/// Where the uses of memory end, on each of the streams that use it: lanes do not wait for each other.
template <executor Executor>
class UseEnds {
 public:
  using stream_type = typename Executor::stream_type;

  /// What `s` has enqueued so far uses the memory.
  void record(const Executor& executor, stream_type s) {
    Lane& lane = lane_of(executor, s);
    if constexpr (!std::equality_comparable<stream_type>) {
      if (lane.stream) executor.wait(s, lane.end);  // one lane stands for all
    }
    lane.stream = s;
    executor.record(lane.end, s);
  }
  /// What follows on `s` comes after all uses.
  void await(const Executor& executor, stream_type s) const {
    for (const Lane& lane : lanes_) {
      if (lane.stream) executor.wait(s, lane.end);
    }
  }
  /// Nobody waits for the uses so far any more.
  void forget() {
    for (Lane& lane : lanes_) lane.stream.reset();
  }

 private:
  struct Lane {
    std::optional<stream_type> stream;  // empty: nothing was recorded
    typename Executor::event_type end;
  };

  Lane& lane_of(const Executor& executor, stream_type s) {
    if constexpr (std::equality_comparable<stream_type>) {
      for (Lane& lane : lanes_) {
        if (lane.stream == s) return lane;
      }
      for (Lane& lane : lanes_) {
        if (!lane.stream) return lane;
      }
    } else if (!lanes_.empty()) {
      return lanes_.front();
    }
    return lanes_.emplace_back(Lane{std::nullopt, executor.make_event()});
  }

  std::vector<Lane> lanes_;
};

/// What Sharder's calls `begin`, `acquire`, `release`, `weights_changed`, `fork` and `join` do about units of weights.
template <executor Executor>
class Gatherer {
 public:
  using stream_type = typename Executor::stream_type;

  explicit Gatherer(ShardState<Executor>& state)
      : state_(&state),
        holds_(state.plan.layouts.size()),
        weights_written_(state.executor.make_event()),
        joined_(state.executor.make_event()) {
    for (const Param kind : {Param::dense, Param::expert}) {
      for (int i = 0; i < state.plan.of(kind).slots; ++i) {
        slots_.push_back({kind, i, state.executor.make_event(), state.executor.make_event()});
      }
    }
  }

  void begin(std::span<const int> order) {
    for (const int unit : order) state_->check_unit(unit);
    order_.begin(order);
  }

  /// See Sharder::acquire.
  UnitView acquire(int unit, const ShardStreams<stream_type>& streams) {
    state_->check_unit(unit);
    if (!order_.advance(unit)) fail_order(unit);
    if (is_whole(unit)) {
      ++holds(unit);
      prefetch(streams);
      state_->executor.wait(streams.compute, weights_written_);
      return state_->view(unit, static_cast<std::byte*>(const_cast<void*>(gathered_part(unit))), state_->plan.compute);
    }
    Slot* slot = find(unit);
    if (slot == nullptr) {
      slot = furthest_use(state_->kind(unit));
      if (slot == nullptr) fail_slots(unit);
      fetch(*slot, unit, streams);
    }
    ++holds(unit);
    slot->last_use = ++uses_;
    prefetch(streams);
    receive(*slot, streams.compute);
    return state_->view(unit, bytes_of(*slot), state_->plan.compute);
  }

  /// See Sharder::release.
  void release(int unit, const ShardStreams<stream_type>& streams) {
    state_->check_unit(unit);
    if (holds(unit) == 0) {
      fail<shape_error>("pleat[F10]: unit ", state_->name(unit),
                        " is released, but nobody holds it; acquire comes first");
    }
    if (Slot* const slot = find(unit)) {
      state_->executor.wait(streams.compute, slot->released);  // by a holder on another stream
      state_->executor.record(slot->released, streams.compute);
    }
    if (is_whole(unit)) whole_uses_.record(state_->executor, streams.compute);
    --holds(unit);
  }

  /// See Sharder::check_released.
  void check_released() const {
    const auto held = std::find_if(holds_.begin(), holds_.end(), [](int count) { return count != 0; });
    if (held != holds_.end()) {
      fail<shape_error>("pleat[F10]: weights changed while unit ",
                        state_->name(static_cast<int>(held - holds_.begin())), " is held; release it first");
    }
  }

  /// What follows on `compute` may write the shards: units that are used where they lie were released on every stream.
  void await_uses(stream_type compute) const { whole_uses_.await(state_->executor, compute); }

  /// The shards have other values, by work on `compute`: what was gathered before, or is being gathered, is of no use.
  void weights_changed(stream_type compute) {
    check_released();
    for (Slot& slot : slots_) {
      slot.unit = -1;
      slot.last_use = 0;
    }
    state_->executor.record(weights_written_, compute);
  }

  /// See Sharder. Drops what slots hold: a graph cannot know what is there when it is replayed.
  void fork(const ShardStreams<stream_type>& streams) {
    if (std::any_of(slots_.begin(), slots_.end(), [](const Slot& slot) { return !slot.arrived; })) state_->fail_fork();
    weights_changed(streams.compute);
    whole_uses_.forget();
    for (Slot& slot : slots_) state_->executor.record(slot.released, streams.compute);
    state_->executor.wait(streams.gather, weights_written_);
  }
  void join(const ShardStreams<stream_type>& streams) {
    state_->executor.record(joined_, streams.gather);
    state_->executor.wait(streams.compute, joined_);
    for (Slot& slot : slots_) {
      if (!slot.arrived) receive(slot, streams.compute);
    }
    await_uses(streams.compute);
    whole_uses_.forget();
  }

  /// The order of uses that is left; gathers so far.
  const UseOrder& order() const { return order_; }
  std::int64_t gathers() const { return gathers_; }

 private:
  using event_type = typename Executor::event_type;

  struct Slot {
    Param kind;
    int index;            // of its kind
    event_type gathered;  // this rank's part is in, and all of it once it has arrived, or on the collective path
    event_type released;  // all holders are done
    int unit = -1;
    int travels = -1;     // what was fetched last, even where it is of no use any more
    bool arrived = true;  // its peers' parts have been awaited
    std::int64_t last_use = 0;
  };

  std::byte* bytes_of(const Slot& slot) const {
    return state_->transport(slot.kind).buffers().slots[static_cast<std::size_t>(slot.index)];
  }
  int& holds(int unit) { return holds_[static_cast<std::size_t>(unit)]; }
  /// Whether this rank's shard is all of the unit, which is then used where it lies.
  bool is_whole(int unit) const { return state_->plan.of(state_->kind(unit)).ranks == 1; }
  /// What of the unit this rank has: of the compute dtype.
  const void* gathered_part(int unit) const {
    const ShardMemory& shard = state_->shard(unit);
    return shard.compute != nullptr ? shard.compute : shard.master;
  }
  Slot* find(int unit) {
    for (Slot& slot : slots_) {
      if (slot.unit == unit) return &slot;
    }
    return nullptr;
  }
  std::size_t next_use(const Slot& slot) const { return slot.unit < 0 ? UseOrder::never : order_.next_use(slot.unit); }
  /// The slot of a kind, not held, whose unit is needed last (of equals the one used longest ago); null when all are
  /// held.
  Slot* furthest_use(Param kind) {
    Slot* best = nullptr;
    for (Slot& slot : slots_) {
      if (slot.kind != kind || (slot.unit >= 0 && holds(slot.unit) != 0)) continue;
      if (best == nullptr || is_needed_later(slot, *best)) best = &slot;
    }
    return best;
  }
  bool is_needed_later(const Slot& a, const Slot& b) const {
    const std::size_t next_of_a = next_use(a), next_of_b = next_use(b);
    return next_of_a != next_of_b ? next_of_a > next_of_b : a.last_use < b.last_use;
  }
  /// Fetches the units of the next uses, in order, as far as there are slots with nothing needed sooner.
  void prefetch(const ShardStreams<stream_type>& streams) {
    const std::size_t end = std::min(order_.size(), order_.next() + static_cast<std::size_t>(state_->plan.prefetch));
    for (std::size_t use = order_.next(); use < end; ++use) {
      const int unit = order_[use];
      if (is_whole(unit) || find(unit) != nullptr) continue;
      Slot* const slot = furthest_use(state_->kind(unit));
      if (slot == nullptr || next_use(*slot) < use) return;
      fetch(*slot, unit, streams);
    }
  }
  void fetch(Slot& slot, int unit, const ShardStreams<stream_type>& streams) {
    // Collectives move everything on one stream; a capture would not get the other one back.
    const stream_type own = state_->plan.uses_peers(slot.kind) ? streams.own : streams.gather;
    if (!slot.arrived) arrive(slot, own);
    for (const stream_type s : std::array{own, streams.gather}) {
      state_->executor.wait(s, slot.released);
      state_->executor.wait(s, weights_written_);
    }
    state_->transport(slot.kind).gather(slot.index, unit, gathered_part(unit), streams.gather, own);
    state_->executor.record(slot.gathered, streams.gather);
    slot.unit = slot.travels = unit;
    slot.arrived = false;
    ++gathers_;
  }
  /// What follows on `compute` sees the whole unit; so does what waits for `gathered` on another stream.
  void receive(Slot& slot, stream_type compute) {
    const bool is_first = !slot.arrived;
    if (is_first) arrive(slot, compute);
    state_->executor.wait(compute, slot.gathered);
    if (is_first) state_->executor.record(slot.gathered, compute);
  }
  void arrive(Slot& slot, stream_type s) {
    state_->transport(slot.kind).await_gather(slot.index, slot.travels, s);
    slot.arrived = true;
  }

  [[noreturn]] void fail_order(int unit) const {
    const std::size_t at = order_.next();
    fail<shape_error>("pleat[F09]: use ", at, " is of unit ", state_->name(unit),
                      ", but the order given to begin() has ", at < order_.size() ? state_->name(order_[at]) : "ended",
                      "; acquire units in that order");
  }
  [[noreturn]] void fail_slots(int unit) const {
    fail<shape_error>("pleat[F10]: unit ", state_->name(unit), " has no slot: all ",
                      state_->plan.of(state_->kind(unit)).slots,
                      " of its kind are held; release a unit, or plan with a larger prefetch");
  }

  ShardState<Executor>* state_;
  std::vector<Slot> slots_;
  std::vector<int> holds_;  // [unit]
  UseOrder order_;
  UseEnds<Executor> whole_uses_;
  event_type weights_written_;
  event_type joined_;
  std::int64_t uses_ = 0;
  std::int64_t gathers_ = 0;
};

}  // namespace pleat::inline v0::fsdp
