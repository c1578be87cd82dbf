// A model of ranks whose streams signal each other: records what the classes of signal_protocol.hpp make them do, and
// explores every interleaving of the steps, for deadlock, overwriting, stale data, and waits that outlive a failure.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <unordered_set>
#include <vector>

#include <pleat/comm/signal_protocol.hpp>
#include <pleat/core/device.hpp>

namespace signal_model {

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

inline Found explored(const Model& model, const World& world = {}) {
  return Explorer(model, world).explore();
}

}  // namespace signal_model
