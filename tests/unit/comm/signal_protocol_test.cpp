// The proof of signal_protocol.hpp: its classes drive the streams of a few ranks, and every interleaving of their steps
// is explored, with graphs that are captured once and replayed, with late ranks, and with a failure in every state. The
// variants that were thought of and are wrong must be found.
#include <pleat/comm/signal_protocol.hpp>
#include <pleat/core/device.hpp>

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include <doctest/doctest.h>

namespace {

using pleat::FlagLayout;
using pleat::SignalWait;
using pleat::SignalWaiter;
using pleat::SignalWriter;
namespace signal_value = pleat::signal_value;

enum class Act : std::uint8_t { write_flag, wait_flag, begin_write, end_write, begin_read, end_read };

/// What a stream does next. Accesses to data take two steps, so that others can come between.
struct Step {
  Act act;
  std::size_t place;        // of a flag or a slot
  std::uint64_t value = 0;  // written, or waited for
};
using Program = std::vector<Step>;

/// What is wrong with a variant of the protocol.
enum class Variant {
  none,
  counts_in_graphs,  // captured awaits go on counting, and take nothing
  two_words,         // captured signals use two words in turn, without regard to credits
  takes_late,        // an await's `taken` is written after the answer
};

/// Records the streams of all ranks. A step goes to a stream, or, during a capture, to the graph.
class Model {
 public:
  using Graph = std::vector<Program>;  // [stream]

  Model(int ranks, int channels, int streams_per_rank = 1, Variant variant = Variant::none)
      : ranks_(ranks),
        layout_{ranks},
        area_(layout_.words(channels)),
        streams_per_rank_(streams_per_rank),
        variant_(variant),
        streams_(static_cast<std::size_t>(ranks * streams_per_rank)),
        late_takes_(streams_.size()),
        writers_(2 * area_ * static_cast<std::size_t>(ranks)),
        waiters_(writers_.size()),
        signals_(writers_.size()),
        awaits_(writers_.size()) {}

  int ranks() const { return ranks_; }
  std::size_t flags() const { return writers_.size(); }
  std::size_t slots() const { return slots_.size(); }
  int rank_of(std::size_t stream) const { return static_cast<int>(stream) / streams_per_rank_; }
  /// The rank whose memory the flag lies in.
  int owner_of_flag(std::size_t flag) const { return static_cast<int>(flag / 2 / area_); }
  const std::vector<Program>& streams() const { return streams_; }

  void signal(int from, int to, int channel, int stream) {
    const std::size_t flag = flag_of(from, to, channel);
    record(from, stream, {Act::write_flag, word_of(flag, signals_), writers_[flag].next()});
    Program& late = late_takes_[stream_of(from, stream)];
    for (const Step& step : late) record(from, stream, step);
    late.clear();
  }
  void await(int from, int to, int channel, int stream) {
    const std::size_t flag = flag_of(from, to, channel), word = word_of(flag, awaits_);
    const SignalWait wait = waiters_[flag].next(captures());
    record(to, stream, {Act::wait_flag, word, wait.at_least});
    const Step take = {Act::write_flag, word, signal_value::taken};
    if (wait.takes && variant_ == Variant::takes_late) {
      late_takes_[stream_of(to, stream)].push_back(take);
    } else if (wait.takes) {
      record(to, stream, take);
    }
  }
  /// Rank `rank` writes or reads what `from` passes to `to` through slot `slot`.
  void write(int rank, int from, int to, int slot, int stream) {
    for (const Act act : {Act::begin_write, Act::end_write}) record(rank, stream, {act, slot_of(from, to, slot)});
  }
  void read(int rank, int from, int to, int slot, int stream) {
    for (const Act act : {Act::begin_read, Act::end_read}) record(rank, stream, {act, slot_of(from, to, slot)});
  }

  Graph capture(const std::function<void(Model&)>& work) {
    Graph graph(streams_.size());
    graph_ = &graph;
    work(*this);
    graph_ = nullptr;
    return graph;
  }
  void replay(const Graph& graph, int times = 1) {
    for (; times > 0; --times) {
      for (std::size_t s = 0; s < streams_.size(); ++s) {
        streams_[s].insert(streams_[s].end(), graph[s].begin(), graph[s].end());
      }
    }
  }

 private:
  std::size_t stream_of(int rank, int stream) const {
    return static_cast<std::size_t>(rank * streams_per_rank_ + stream % streams_per_rank_);
  }
  std::size_t flag_of(int from, int to, int channel) const {
    return 2 * (static_cast<std::size_t>(to) * area_ + layout_.word(from, channel));
  }
  std::size_t slot_of(int from, int to, int slot) {
    return slots_.try_emplace(std::array{from, to, slot}, slots_.size()).first->second;
  }
  /// A flag has a second word for the variant that needs one.
  std::size_t word_of(std::size_t flag, std::vector<int>& uses) const {
    return flag + static_cast<std::size_t>(graph_ != nullptr && variant_ == Variant::two_words ? uses[flag]++ % 2 : 0);
  }
  bool captures() const { return graph_ != nullptr && variant_ != Variant::counts_in_graphs; }
  void record(int rank, int stream, const Step& step) {
    (graph_ != nullptr ? *graph_ : streams_)[stream_of(rank, stream)].push_back(step);
  }

  int ranks_;
  FlagLayout layout_;
  std::size_t area_;  // words of a rank's flag area
  int streams_per_rank_;
  Variant variant_;
  std::vector<Program> streams_;
  std::vector<Program> late_takes_;  // [stream]
  std::vector<SignalWriter> writers_;
  std::vector<SignalWaiter> waiters_;
  std::vector<int> signals_, awaits_;  // captured ones of each flag
  std::map<std::array<int, 3>, std::size_t> slots_;
  Graph* graph_ = nullptr;
};

/// One rank's window, for schedules written against peer_access. A stream is its number.
struct ModelPeers {
  using device_type = pleat::host_device;
  using stream_type = int;

  int rank() const noexcept { return my_rank; }
  int size() const noexcept { return model->ranks(); }
  std::byte* base(int) const { return nullptr; }
  void signal(int peer, int channel, int s) { model->signal(my_rank, peer, channel, s); }
  void await(int peer, int channel, int s) { model->await(peer, my_rank, channel, s); }

  Model* model;
  int my_rank;
};
static_assert(pleat::peer_access<ModelPeers>);

/// What may happen beside the streams' steps.
struct World {
  bool fails = false;  // in any state a rank may stop for ever; the others then release their flags until they are idle
  std::uint64_t release = signal_value::released;
  bool releases_once = false;
};

struct Found {
  bool deadlock = false, overwrite = false, wrong_content = false, hangs_after_failure = false;
  std::size_t states = 0;
  bool is_right() const { return !deadlock && !overwrite && !wrong_content && !hangs_after_failure; }
};

class Explorer {
 public:
  Explorer(const Model& model, const World& world) : model_(model), world_(world) {}

  Found explore() {
    visit(State{std::vector<std::uint16_t>(model_.streams().size()), std::vector<std::uint64_t>(model_.flags()),
                std::vector<Slot>(model_.slots()), -1, std::vector<bool>(static_cast<std::size_t>(model_.ranks()))});
    while (!todo_.empty()) {
      const State state = std::move(todo_.back());
      todo_.pop_back();
      expand(state);
    }
    found_.states = seen_.size();
    return found_;
  }

 private:
  struct Slot {
    std::uint8_t written = 0, read = 0;  // how often
    bool is_written = false, is_read = false;
  };
  struct State {
    std::vector<std::uint16_t> at;  // each stream's next step
    std::vector<std::uint64_t> flags;
    std::vector<Slot> slots;
    int failed_rank;
    std::vector<bool> has_released;  // [rank]

    std::string key() const {
      std::string key;
      for (const std::uint16_t step : at) {
        key += static_cast<char>(step / 256);
        key += static_cast<char>(step % 256);
      }
      for (const std::uint64_t flag : flags)
        key += flag >= 200 ? (flag == signal_value::released ? '\xFF' : '\xFE') : static_cast<char>(flag);
      for (const Slot& slot : slots) {
        key += static_cast<char>(slot.written);
        key += static_cast<char>(slot.read);
        key += static_cast<char>(slot.is_written * 2 + slot.is_read);
      }
      key += static_cast<char>(failed_rank + 1);
      for (const bool has : has_released) key += static_cast<char>(has);
      return key;
    }
  };

  void visit(State&& state) {
    if (seen_.insert(state.key()).second) todo_.push_back(std::move(state));
  }
  bool is_over(const State& state, std::size_t stream) const {
    return model_.rank_of(stream) == state.failed_rank || state.at[stream] == model_.streams()[stream].size();
  }
  const Step& step_of(const State& state, std::size_t stream) const {
    return model_.streams()[stream][state.at[stream]];
  }
  bool is_blocked(const State& state, std::size_t stream) const {
    const Step& step = step_of(state, stream);
    return step.act == Act::wait_flag && !pleat::ends_wait(state.flags[step.place], step.value);
  }

  void expand(const State& state) {
    bool goes_on = false, ends = true;
    for (std::size_t stream = 0; stream < state.at.size(); ++stream) {
      if (is_over(state, stream)) continue;
      ends = false;
      if (is_blocked(state, stream)) continue;
      goes_on = true;
      State next = state;
      take(next, stream);
      visit(std::move(next));
    }
    if (ends) return;
    if (state.failed_rank < 0) {
      if (!goes_on) found_.deadlock = true;
      for (int rank = 0; world_.fails && rank < model_.ranks(); ++rank) {
        State next = state;
        next.failed_rank = rank;
        visit(std::move(next));
      }
      return;
    }
    for (int rank = 0; rank < model_.ranks(); ++rank) {
      State next = state;
      if (!release(next, rank)) continue;
      for (std::size_t stream = 0; stream < state.at.size(); ++stream) {
        if (model_.rank_of(stream) == rank && !is_over(next, stream)) goes_on = goes_on || !is_blocked(next, stream);
      }
      visit(std::move(next));
    }
    if (!goes_on) found_.hangs_after_failure = true;
  }

  /// The rank's release stream writes all its flags.
  bool release(State& state, int rank) const {
    if (rank == state.failed_rank) return false;
    if (world_.releases_once) {
      if (state.has_released[static_cast<std::size_t>(rank)]) return false;
      state.has_released[static_cast<std::size_t>(rank)] = true;
    }
    for (std::size_t flag = 0; flag < state.flags.size(); ++flag) {
      if (model_.owner_of_flag(flag) == rank) state.flags[flag] = world_.release;
    }
    return true;
  }

  void take(State& state, std::size_t stream) {
    const Step& step = step_of(state, stream);
    ++state.at[stream];
    if (step.act == Act::wait_flag) return;
    if (step.act == Act::write_flag) {
      state.flags[step.place] = step.value;
      return;
    }
    if (state.failed_rank >= 0) return;  // data are undefined
    Slot& slot = state.slots[step.place];
    switch (step.act) {
      case Act::begin_write:
        found_.overwrite = found_.overwrite || slot.is_read || slot.written != slot.read;
        slot.is_written = true;
        break;
      case Act::end_write:
        slot.is_written = false;
        ++slot.written;
        break;
      default:
        found_.wrong_content = found_.wrong_content || slot.is_written || slot.written != slot.read + 1;
        slot.is_read = step.act == Act::begin_read;
        if (step.act == Act::end_read) ++slot.read;
    }
  }

  const Model& model_;
  const World world_;
  Found found_;
  std::vector<State> todo_;
  std::unordered_set<std::string> seen_;
};

Found explored(const Model& model, const World& world = {}) {
  return Explorer(model, world).explore();
}

// The uses. Each records one round of all ranks.

/// The other ranks, from the next on.
std::vector<int> peers_of(const Model& model, int rank) {
  std::vector<int> peers;
  for (int i = 1; i < model.ranks(); ++i) peers.push_back((rank + i) % model.ranks());
  return peers;
}
constexpr int free_channel(int slot) {
  return 2 * slot;
}
constexpr int full_channel(int slot) {
  return 2 * slot + 1;
}

/// The ring: a slot starts free, and its credit rests with the writer between rounds and between graphs.
void ring_bind(Model& model, int slots) {
  for (int r = 0; r < model.ranks(); ++r) {
    for (int slot = 0; slot < slots; ++slot) {
      model.signal(r, (r + model.ranks() - 1) % model.ranks(), free_channel(slot), 0);
    }
  }
}
void ring_round(Model& model, int slot, bool awaits_free = true) {
  for (int r = 0; r < model.ranks(); ++r) {
    const int next = (r + 1) % model.ranks(), last = (r + model.ranks() - 1) % model.ranks();
    if (awaits_free) model.await(next, r, free_channel(slot), 0);
    model.write(r, r, next, slot, 0);
    model.signal(r, next, full_channel(slot), 0);
    model.await(last, r, full_channel(slot), 1);
    model.read(r, last, r, slot, 1);
    model.signal(r, last, free_channel(slot), 1);
  }
}
/// A gather: all push to all; no credit rests between rounds.
void gather_round(Model& model, int slot) {
  for (int r = 0; r < model.ranks(); ++r) {
    for (const int peer : peers_of(model, r)) model.signal(r, peer, free_channel(slot), 0);
    for (const int peer : peers_of(model, r)) {
      model.await(peer, r, free_channel(slot), 0);
      model.write(r, r, peer, slot, 0);
      model.signal(r, peer, full_channel(slot), 0);
    }
    for (const int peer : peers_of(model, r)) {
      model.await(peer, r, full_channel(slot), 0);
      model.read(r, peer, r, slot, 0);
    }
  }
}
/// Everybody writes to everybody between two barriers and reads after the second.
void barrier_round(Model& model, bool through_one_flag = false) {
  const auto barrier = [&](int rank, int channel) {
    ModelPeers peers{&model, rank};
    if (!through_one_flag) return pleat::peer_barrier(peers, channel, 0);
    for (const int peer : peers_of(model, rank)) peers.signal(peer, channel, 0);
    for (const int peer : peers_of(model, rank)) peers.await(peer, channel, 0);
  };
  for (int r = 0; r < model.ranks(); ++r) {
    for (const int peer : peers_of(model, r)) model.write(r, r, peer, 0, 0);
    barrier(r, 0);
    for (const int peer : peers_of(model, r)) model.read(r, peer, r, 0, 0);
    barrier(r, through_one_flag ? 0 : 2);
  }
}

/// Calls, replays of a graph captured after them, a call, more replays, and a second graph: `round(model, i)` is a
/// call, and `rounds` of them make a graph.
void calls_and_replays(Model& model, int rounds, const std::function<void(Model&, int)>& round) {
  const auto several = [&](int first, int count) {
    return [&round, first, count](Model& m) {
      for (int i = first; i < first + count; ++i) round(m, i);
    };
  };
  several(0, 1)(model);
  const Model::Graph graph = model.capture(several(1, rounds));
  model.replay(graph, 2);
  several(1 + rounds, 1)(model);
  model.replay(graph);
  model.replay(model.capture(several(0, 1)));
}

Model ring(int ranks, int slots, int streams, int rounds, Variant variant = Variant::none) {
  Model model(ranks, 2 * slots, streams, variant);
  ring_bind(model, slots);
  calls_and_replays(model, rounds, [&](Model& m, int i) { ring_round(m, i % slots); });
  return model;
}
/// Only replays of one graph, after the bind.
Model replayed_ring(int ranks, int slots, int rounds, int replays, Variant variant = Variant::none, int streams = 1,
                    bool awaits_free = true) {
  Model model(ranks, 2 * slots, streams, variant);
  ring_bind(model, slots);
  model.replay(model.capture([&](Model& m) {
    for (int i = 0; i < rounds; ++i) ring_round(m, i % slots, awaits_free);
  }),
               replays);
  return model;
}
Model replayed_barrier(int ranks, int rounds, int replays, bool through_one_flag) {
  Model model(ranks, 4);
  model.replay(model.capture([&](Model& m) {
    for (int i = 0; i < rounds; ++i) barrier_round(m, through_one_flag);
  }),
               replays);
  return model;
}

TEST_CASE("a flag counts until its first capture, then holds a credit") {
  SignalWriter writer;
  SignalWaiter waiter;
  for (std::uint64_t k = 1; k < 4; ++k) {
    CHECK(writer.next() == k);
    const SignalWait wait = waiter.next(false);
    CHECK(wait.at_least == k);
    CHECK_FALSE(wait.takes);
    CHECK(waiter.count() == k);
  }
  const std::uint64_t resting = writer.next();  // the credit that the first captured await takes
  for (const bool is_captured : {true, true, false}) {
    const SignalWait wait = waiter.next(is_captured);
    CHECK(wait.takes);
    CHECK(pleat::ends_wait(resting, wait.at_least));
    CHECK_FALSE(pleat::ends_wait(resting - 1, wait.at_least));
    CHECK_FALSE(pleat::ends_wait(signal_value::taken, wait.at_least));
    CHECK(pleat::ends_wait(writer.next(), wait.at_least));
    CHECK(waiter.count() == 3);
    CHECK(waiter.holds_credit());
  }
}

TEST_CASE("the compare of streams is cyclic and signed") {
  CHECK(pleat::ends_wait(5, 5));
  CHECK(pleat::ends_wait(6, 5));
  CHECK_FALSE(pleat::ends_wait(4, 5));
  CHECK(pleat::ends_wait(2, ~std::uint64_t{0} - 2));
  CHECK_FALSE(pleat::ends_wait(~std::uint64_t{0}, 1));
  CHECK(pleat::ends_wait(signal_value::released, std::uint64_t{1} << 61));
}

TEST_CASE("flags of an arena: each its own word, at the same place on every rank") {
  constexpr FlagLayout layout{3};
  static_assert(layout.bytes(4) == 4 * 3 * 8);
  std::vector<bool> used(layout.words(4));
  for (int channel = 0; channel < 4; ++channel) {
    for (int source = 0; source < 3; ++source) {
      REQUIRE(layout.word(source, channel) < used.size());
      CHECK_FALSE(used[layout.word(source, channel)]);
      used[layout.word(source, channel)] = true;
    }
    CHECK(layout.word(2, channel) < layout.words(channel + 1));  // a prefix of the area holds the channels so far
  }
}

TEST_CASE("credits pass every interleaving of calls and replays") {
  std::size_t states = 0;
  for (const int ranks : {2, 3}) {
    for (const int slots : {1, 2}) {
      for (const int rounds : {1, 2, 3}) {
        CAPTURE(ranks);
        CAPTURE(slots);
        CAPTURE(rounds);
        const Found found = explored(ring(ranks, slots, 1, rounds));
        CHECK(found.is_right());
        states += found.states;
      }
    }
  }
  CHECK(explored(ring(2, 1, 2, 1)).is_right());  // writes and reads on two streams
  CHECK(explored(replayed_ring(2, 2, 3, 3, Variant::none, 2)).is_right());
  CHECK(states > 10000);  // it did explore
}

TEST_CASE("gathers and barriers pass every interleaving of calls and replays") {
  for (const int rounds : {1, 2}) {
    Model gather(2, 4);
    calls_and_replays(gather, rounds, [](Model& m, int i) { gather_round(m, i % 2); });
    CHECK(explored(gather).is_right());
    Model barrier(2, 4);
    calls_and_replays(barrier, rounds, [](Model& m, int) { barrier_round(m); });
    CHECK(explored(barrier).is_right());
  }
  Model gather(3, 2);
  gather.replay(gather.capture([](Model& m) { gather_round(m, 0); }), 2);
  CHECK(explored(gather).is_right());
  CHECK(explored(replayed_barrier(3, 1, 2, false)).is_right());
}

TEST_CASE("outside graphs a flag counts: a barrier through one flag is right, and so are several signals at once") {
  Model barrier(2, 1);
  for (int i = 0; i < 3; ++i) barrier_round(barrier, true);
  CHECK(explored(barrier).is_right());
  Model ahead(2, 1);
  for (int i = 0; i < 3; ++i) ahead.signal(0, 1, 0, 0);
  for (int i = 0; i < 3; ++i) ahead.await(0, 1, 0, 0);
  CHECK(explored(ahead).is_right());
}

TEST_CASE("in a graph, a barrier through one flag loses a signal and deadlocks") {
  for (const int ranks : {2, 3}) {
    CHECK(explored(replayed_barrier(ranks, 1, ranks == 2 ? 3 : 1, true)).deadlock);
  }
}

TEST_CASE("a writer that does not await its credit overwrites") {
  const Found found = explored(replayed_ring(2, 1, 1, 3, Variant::none, 2, false));
  CHECK(found.overwrite);
  CHECK(found.wrong_content);
}

TEST_CASE("a flag that is taken after the answer wipes out the next signal") {
  const Found found = explored(replayed_ring(2, 1, 1, 3, Variant::takes_late));
  CHECK(found.deadlock);
}

TEST_CASE("counts that are baked into a graph let its second replay pass at once") {
  const Found found = explored(replayed_ring(2, 1, 1, 3, Variant::counts_in_graphs));
  CHECK((found.overwrite && found.wrong_content));
}

TEST_CASE("two words in turn deadlock where a graph has an odd number of signals") {
  const auto two_words = [](int rounds) {
    Model model(2, 2, 1, Variant::two_words);
    model.replay(model.capture([](Model& m) { ring_bind(m, 1); }));
    model.replay(model.capture([&](Model& m) {
      for (int i = 0; i < rounds; ++i) ring_round(m, 0);
    }),
                 3);
    return explored(model);
  };
  CHECK(two_words(2).is_right());
  CHECK(two_words(1).deadlock);
  CHECK(two_words(3).deadlock);
}

TEST_CASE("whenever a rank fails, releases end all waits of the others") {
  const World world{.fails = true};
  CHECK(explored(ring(2, 1, 1, 1), world).is_right());
  CHECK(explored(replayed_ring(2, 1, 1, 2, Variant::none, 2), world).is_right());
  CHECK(explored(replayed_ring(3, 1, 1, 1), world).is_right());
  CHECK(explored(replayed_barrier(2, 1, 2, false), world).is_right());
  Model calls(3, 2);
  ring_bind(calls, 1);
  ring_round(calls, 0);
  CHECK(explored(calls, world).is_right());
}

TEST_CASE("a release that writes ~0 ends no wait") {
  CHECK(explored(replayed_ring(2, 1, 1, 1), {.fails = true, .release = ~std::uint64_t{0}}).hangs_after_failure);
  Model calls(2, 2);
  ring_bind(calls, 1);
  ring_round(calls, 0);
  CHECK(explored(calls, {.fails = true, .release = ~std::uint64_t{0}}).hangs_after_failure);
}

TEST_CASE("one release is not enough: graphs take it, and live peers write over it") {
  CHECK(explored(replayed_ring(2, 1, 1, 3), {.fails = true, .releases_once = true}).hangs_after_failure);
}

}  // namespace
