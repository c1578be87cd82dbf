// A model of the credit protocol of peer_access.hpp: every interleaving of its steps, for deadlock and overwriting, and
// the broken variants that it must find.
#include <cstdint>
#include <set>
#include <vector>

#include <doctest/doctest.h>

namespace {

enum class Act : std::uint8_t {
  await_free,
  begin_write,
  end_write,
  signal_full,
  await_full,
  begin_read,
  end_read,
  signal_free
};

/// One step on a link, the way from a writer to the next rank of the ring, in a round.
struct Step {
  Act act;
  int link, round;
};
using Program = std::vector<Step>;  // what a stream does, in order

struct Protocol {
  int ranks = 2, slots = 2, rounds = 3;
  bool one_stream = true;    // a rank writes and reads in one order; else it does both at once
  bool flags = false;        // a signal sets a flag, which an await waits for and then, in a second step, resets
  bool awaits_free = true;   // the writer waits for the credit
  bool signals_late = true;  // full is signalled after the write, not before it
};

struct Found {
  bool deadlock = false, overwrite = false, wrong_content = false;
  std::size_t states = 0;
  bool is_right() const { return !deadlock && !overwrite && !wrong_content; }
};

class Explorer {
 public:
  explicit Explorer(const Protocol& protocol) : protocol_(protocol) {
    for (int rank = 0; rank < protocol.ranks; ++rank) {
      const Program writer = writes(rank), reader = reads((rank + protocol.ranks - 1) % protocol.ranks);
      if (protocol.one_stream) {
        programs_.push_back(alternating(writer, reader));
      } else {
        programs_.push_back(writer);
        programs_.push_back(reader);
      }
    }
  }

  Found explore() {
    State start;
    start.at.assign(programs_.size(), 0);
    start.links.assign(static_cast<std::size_t>(protocol_.ranks), Link{});
    for (Link& link : start.links) {
      if (!protocol_.flags) link.free = static_cast<std::int8_t>(protocol_.slots);  // signalled by the reader at bind
      link.slots.assign(static_cast<std::size_t>(protocol_.slots), Slot{});
    }
    std::vector<State> todo{start};
    std::set<State> seen{start};
    while (!todo.empty()) {
      const State state = todo.back();
      todo.pop_back();
      bool can_go_on = false, is_done = true;
      for (std::size_t stream = 0; stream < programs_.size(); ++stream) {
        if (static_cast<std::size_t>(state.at[stream]) == programs_[stream].size()) continue;
        is_done = false;
        State next = state;
        if (!advance(next, stream)) continue;
        can_go_on = true;
        if (seen.insert(next).second) todo.push_back(next);
      }
      if (!is_done && !can_go_on) found_.deadlock = true;
    }
    found_.states = seen.size();
    return found_;
  }

 private:
  struct Slot {
    std::int8_t content = -1;  // the round that was written last
    bool is_written = false, is_read = false, is_unread = false;
    auto operator<=>(const Slot&) const = default;
  };
  struct Link {
    std::int8_t free = 0, full = 0;
    bool resets_free = false, resets_full = false;  // between an await of a flag and its reset
    std::vector<Slot> slots;
    auto operator<=>(const Link&) const = default;
  };
  struct State {
    std::vector<std::int8_t> at;  // each stream's next step
    std::vector<Link> links;
    auto operator<=>(const State&) const = default;
  };

  /// A flag cannot hold a credit for each slot that starts empty, so its writer takes those without waiting.
  bool awaits_free(int round) const { return protocol_.awaits_free && !(protocol_.flags && round < protocol_.slots); }
  Program writes(int link) const {
    Program program;
    for (int round = 0; round < protocol_.rounds; ++round) {
      if (awaits_free(round)) program.push_back({Act::await_free, link, round});
      if (!protocol_.signals_late) program.push_back({Act::signal_full, link, round});
      program.push_back({Act::begin_write, link, round});
      program.push_back({Act::end_write, link, round});
      if (protocol_.signals_late) program.push_back({Act::signal_full, link, round});
    }
    return program;
  }
  Program reads(int link) const {
    Program program;
    for (int round = 0; round < protocol_.rounds; ++round) {
      for (const Act act : {Act::await_full, Act::begin_read, Act::end_read, Act::signal_free}) {
        program.push_back({act, link, round});
      }
    }
    return program;
  }
  /// Round by round: the write of a round, then its read.
  static Program alternating(const Program& a, const Program& b) {
    Program both;
    std::size_t i = 0, j = 0;
    while (i < a.size() || j < b.size()) {
      const int round = i < a.size() ? a[i].round : b[j].round;
      for (; i < a.size() && a[i].round == round; ++i) both.push_back(a[i]);
      for (; j < b.size() && b[j].round == round; ++j) both.push_back(b[j]);
    }
    return both;
  }

  /// Waits for a signal: takes one of the count, or sees the flag and, in a step of its own, resets it.
  /// Gives false where it has to wait; `is_over` once the step is behind the stream.
  bool await(std::int8_t& signals, bool& resets, bool& is_over) const {
    if (resets) {
      signals = 0;
      resets = false;
    } else {
      if (signals == 0) return false;
      if (protocol_.flags) {
        resets = true;
        is_over = false;
      } else {
        --signals;
      }
    }
    return true;
  }
  void signal(std::int8_t& signals) const { signals = static_cast<std::int8_t>(protocol_.flags ? 1 : signals + 1); }

  bool advance(State& state, std::size_t stream) {
    const Step& step = programs_[stream][static_cast<std::size_t>(state.at[stream])];
    Link& link = state.links[static_cast<std::size_t>(step.link)];
    Slot& slot = link.slots[static_cast<std::size_t>(step.round % protocol_.slots)];
    bool is_over = true;
    switch (step.act) {
      case Act::await_free:
        if (!await(link.free, link.resets_free, is_over)) return false;
        break;
      case Act::await_full:
        if (!await(link.full, link.resets_full, is_over)) return false;
        break;
      case Act::begin_write:
        if (slot.is_unread || slot.is_read) found_.overwrite = true;
        slot.is_written = true;
        break;
      case Act::end_write:
        slot.content = static_cast<std::int8_t>(step.round);
        slot.is_written = false;
        slot.is_unread = true;
        break;
      case Act::begin_read:
        if (slot.content != step.round || slot.is_written) found_.wrong_content = true;
        slot.is_read = true;
        slot.is_unread = false;
        break;
      case Act::end_read:
        if (slot.content != step.round || slot.is_written) found_.wrong_content = true;
        slot.is_read = false;
        break;
      case Act::signal_full:
        signal(link.full);
        break;
      case Act::signal_free:
        signal(link.free);
        break;
    }
    if (is_over) ++state.at[stream];
    return true;
  }

  const Protocol protocol_;
  std::vector<Program> programs_;
  Found found_;
};

Found explored(const Protocol& protocol) {
  return Explorer(protocol).explore();
}

TEST_CASE("counted credits neither deadlock nor overwrite, in any interleaving") {
  for (const int slots : {1, 2}) {
    for (const int ranks : {2, 3}) {
      const Found found = explored({.ranks = ranks, .slots = slots, .rounds = 4});
      CHECK(found.is_right());
      CHECK(found.states > 100);  // it did explore
    }
    CHECK(explored({.ranks = 2, .slots = slots, .rounds = 3, .one_stream = false}).is_right());
  }
}

TEST_CASE("one slot may do with a flag, since no two signals meet") {
  CHECK(explored({.ranks = 2, .slots = 1, .rounds = 4, .flags = true}).is_right());
}

TEST_CASE("a writer that does not await its credit overwrites") {
  for (const Protocol& protocol :
       {Protocol{.one_stream = false, .awaits_free = false}, Protocol{.slots = 1, .awaits_free = false},
        Protocol{.ranks = 3, .rounds = 4, .awaits_free = false}}) {
    const Found found = explored(protocol);
    CHECK(found.overwrite);
    CHECK(found.wrong_content);
    CHECK_FALSE(found.is_right());
  }
  // In one order of writes and reads, two ranks are each other's credit, but only up to two slots behind.
  CHECK(explored({.ranks = 2, .slots = 2, .rounds = 4, .awaits_free = false}).is_right());
}

TEST_CASE("a single flag for two slots, written, awaited and reset, loses a signal and deadlocks") {
  CHECK(explored({.rounds = 4, .one_stream = false, .flags = true}).deadlock);
  CHECK(explored({.ranks = 3, .rounds = 4, .flags = true}).deadlock);
}

TEST_CASE("a signal before the write that it announces shows what was there before") {
  CHECK(explored({.rounds = 3, .signals_late = false}).wrong_content);
}

}  // namespace
