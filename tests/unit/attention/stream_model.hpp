// A device that computes nothing and writes down who touches which memory in which order: streams, events, signals and
// messages of all ranks become one graph of what happens before what. A schedule is sound when the graph has no cycle
// (no deadlock), every wait is answered, and any two touches of the same byte, one of them a write, are ordered by it -
// for every timing, not only for the one that a run happens to have.
#pragma once

#include <pleat/attention/local_kernel.hpp>
#include <pleat/comm/communicator.hpp>
#include <pleat/comm/peer_access.hpp>
#include <pleat/core/executor.hpp>

#include <array>
#include <map>
#include <string>
#include <vector>

namespace stream_model {

using namespace pleat;

struct ModelDevice {};

/// The graph. Nodes of one stream follow each other; a touch lasts from its first node to its last.
class History {
 public:
  struct Touch {
    const std::byte* begin;
    const std::byte* end;
    bool writes;
    int first, last;  // nodes
    const char* what;
  };

  int add(int stream) {
    const int node = static_cast<int>(before_.size());
    before_.emplace_back();
    const auto [last, is_first] = last_.try_emplace(stream, node);
    if (!is_first) order(last->second, node);
    last->second = node;
    return node;
  }
  void order(int earlier, int later) { before_[static_cast<std::size_t>(later)].push_back(earlier); }
  void touch(int first, int last, const void* data, std::size_t bytes, bool writes, const char* what) {
    const auto* begin = static_cast<const std::byte*>(data);
    if (bytes != 0) touches_.push_back({begin, begin + bytes, writes, first, last, what});
  }
  void touch(int node, const TensorRef& t, bool writes, const char* what) {
    if (!t.is_contiguous()) problem_ = std::string("the model takes contiguous tensors only: ") + what;
    touch(node, node, t.data(), static_cast<std::size_t>(t.elems()) * size_bytes(t.dtype()), writes, what);
  }

  void signal(int from, int to, int channel, int node) { signals_[{from, to, channel}].push_back(node); }
  void await(int from, int to, int channel, int node) { awaits_[{from, to, channel}].push_back(node); }
  struct Message {
    int start, end;
    std::size_t elems;
  };
  void send(int from, int to, Message m) { sends_[{from, to, 0}].push_back(m); }
  void receive(int from, int to, Message m) { receives_[{from, to, 0}].push_back(m); }

  /// What is wrong with the schedule; empty when nothing is. Call once, when all ranks have made all calls.
  std::string check() {
    match();
    if (problem_.empty()) find_order();
    if (problem_.empty()) find_races();
    return problem_;
  }

 private:
  using Link = std::array<int, 3>;  // from, to, channel

  void match() {
    for (const auto& [link, waits] : awaits_) {
      const auto& given = signals_[link];
      if (given.size() < waits.size()) problem_ = "an await that no signal answers";
      for (std::size_t i = 0; i < std::min(given.size(), waits.size()); ++i) order(given[i], waits[i]);
    }
    for (auto& [link, sent] : sends_) receives_.try_emplace(link);
    for (const auto& [link, received] : receives_) {
      const auto& sent = sends_[link];
      if (sent.size() != received.size()) problem_ = "sends and receives that do not match";
      for (std::size_t i = 0; i < std::min(sent.size(), received.size()); ++i) {
        if (sent[i].elems != received[i].elems) problem_ = "a message of another size than its receive";
        order(sent[i].start, received[i].end);
        order(received[i].start, sent[i].end);
      }
    }
  }

  void find_order() {
    const std::size_t n = before_.size(), words = (n + 63) / 64;
    std::vector<std::vector<int>> after(n);
    std::vector<std::size_t> waits_for(n);
    std::vector<std::size_t> ready;
    for (std::size_t node = 0; node < n; ++node) {
      waits_for[node] = before_[node].size();
      for (const int earlier : before_[node])
        after[static_cast<std::size_t>(earlier)].push_back(static_cast<int>(node));
      if (waits_for[node] == 0) ready.push_back(node);
    }
    ancestors_.assign(n, std::vector<std::uint64_t>(words));
    std::size_t done = 0;
    for (; done < ready.size(); ++done) {
      const std::size_t node = ready[done];
      for (const int earlier : before_[node]) {
        const auto e = static_cast<std::size_t>(earlier);
        for (std::size_t w = 0; w < words; ++w) ancestors_[node][w] |= ancestors_[e][w];
        ancestors_[node][e / 64] |= std::uint64_t{1} << (e % 64);
      }
      for (const int later : after[node]) {
        if (--waits_for[static_cast<std::size_t>(later)] == 0) ready.push_back(static_cast<std::size_t>(later));
      }
    }
    if (done != n) problem_ = "a deadlock: work that waits for itself";
  }

  bool is_before(int earlier, int later) const {
    const auto e = static_cast<std::size_t>(earlier);
    return (ancestors_[static_cast<std::size_t>(later)][e / 64] >> (e % 64) & 1) != 0;
  }
  void find_races() {
    std::sort(touches_.begin(), touches_.end(), [](const Touch& a, const Touch& b) { return a.begin < b.begin; });
    for (std::size_t i = 0; i < touches_.size(); ++i) {
      const Touch& a = touches_[i];
      for (std::size_t j = i + 1; j < touches_.size() && touches_[j].begin < a.end; ++j) {
        const Touch& b = touches_[j];
        if ((!a.writes && !b.writes) || (a.first == b.first && a.last == b.last)) continue;
        if (!is_before(a.last, b.first) && !is_before(b.last, a.first)) {
          problem_ = std::string("a race between ") + a.what + " and " + b.what;
          return;
        }
      }
    }
  }

  std::vector<std::vector<int>> before_;  // direct predecessors of each node
  std::map<int, int> last_;               // of each stream
  std::vector<Touch> touches_;
  std::map<Link, std::vector<int>> signals_, awaits_;
  std::map<Link, std::vector<Message>> sends_, receives_;
  std::vector<std::vector<std::uint64_t>> ancestors_;
  std::string problem_;
};

struct ModelStream {
  History* history = nullptr;
  int index = 0;  // streams of different ranks have different numbers

  int add() const { return history->add(index); }
};
struct ModelEvent {
  int node = -1;
};

struct ModelExecutor {
  using device_type = ModelDevice;
  using stream_type = ModelStream;
  using event_type = ModelEvent;

  Device device() const { return {DeviceKind::cuda, 0}; }
  ModelEvent make_event() const { return {}; }
  void record(ModelEvent& event, ModelStream s) const { event.node = s.add(); }
  void wait(ModelStream s, const ModelEvent& event) const {
    const int node = s.add();
    if (event.node >= 0) s.history->order(event.node, node);
  }
  void copy(void* out, const void* in, std::size_t bytes, ModelStream s) const {
    const int node = s.add();
    s.history->touch(node, node, in, bytes, false, "the source of a copy");
    s.history->touch(node, node, out, bytes, true, "the target of a copy");
  }
  void copy_2d(void* out, std::size_t out_pitch, const void* in, std::size_t in_pitch, std::size_t width,
               std::size_t height, ModelStream s) const {
    for (std::size_t row = 0; row < height; ++row) {
      copy(static_cast<std::byte*>(out) + row * out_pitch, static_cast<const std::byte*>(in) + row * in_pitch, width,
           s);
    }
  }
  void zero(void* out, std::size_t bytes, ModelStream s) const {
    const int node = s.add();
    s.history->touch(node, node, out, bytes, true, "a zeroing");
  }
};

/// What is copied when plans are compared lies in the memory of a host thread, which the model has one of for all
/// ranks.
struct UntrackedExecutor : ModelExecutor {
  void copy(void*, const void*, std::size_t, ModelStream s) const { s.add(); }
};

class ModelPeers {
 public:
  using device_type = ModelDevice;
  using stream_type = ModelStream;

  ModelPeers(int rank, std::vector<std::byte*> bases) : rank_(rank), bases_(std::move(bases)) {}
  int rank() const noexcept { return rank_; }
  int size() const noexcept { return static_cast<int>(bases_.size()); }
  std::byte* base(int peer) const { return bases_[static_cast<std::size_t>(peer)]; }
  void signal(int peer, int channel, ModelStream s) { s.history->signal(rank_, peer, channel, s.add()); }
  void await(int peer, int channel, ModelStream s) { s.history->await(peer, rank_, channel, s.add()); }

 private:
  int rank_;
  std::vector<std::byte*> bases_;
};

struct ModelArena {
  int rank;
  std::vector<std::byte*> bases;
  bool reachable(const Group&) const { return true; }
  ModelPeers open(const Group&, std::size_t, int) { return ModelPeers(rank, bases); }
};

/// Point-to-point batches; the ring uses nothing else once it is bound.
class ModelComm {
 public:
  using device_type = ModelDevice;
  using stream_type = ModelStream;

  ModelComm(int rank, int size) : rank_(rank), size_(size) {}
  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }
  ModelComm split(int, int) { return *this; }
  void all_gather(const void*, void*, std::size_t, DType, ModelStream) {}
  void all_gather_v(const void*, void*, Counts, DType, ModelStream) {}
  void all_to_all(const void*, void*, std::size_t, DType, ModelStream) {}
  void all_to_all_v(const void*, Counts, void*, Counts, DType, ModelStream) {}
  void broadcast(void*, std::size_t, int, DType, ModelStream) {}
  void barrier(ModelStream) {}
  void wait(ModelStream) {}
  void exchange(std::span<const Send> tx, std::span<const Recv> rx, DType dtype, ModelStream s) {
    const int start = s.add(), end = s.add();
    for (const Send& m : tx) {
      s.history->send(rank_, m.peer, {start, end, m.elems});
      s.history->touch(start, end, m.data, m.elems * size_bytes(dtype), false, "a send");
    }
    for (const Recv& m : rx) {
      s.history->receive(m.peer, rank_, {start, end, m.elems});
      s.history->touch(start, end, m.data, m.elems * size_bytes(dtype), true, "a receive");
    }
  }

 private:
  int rank_, size_;
};

}  // namespace stream_model

namespace pleat::inline v0 {

template <>
struct detail::ExecutorFor<stream_model::ModelDevice> {
  using type = stream_model::UntrackedExecutor;
};

template <>
struct core_leaf<stream_model::ModelDevice> {
  static void sum_ranks(void* out, DType dtype, std::span<const void* const> parts, DType, std::size_t elems, bool,
                        stream_model::ModelStream s) {
    const int node = s.add();
    for (const void* part : parts) s.history->touch(node, node, part, elems * size_bytes(dtype), false, "a term");
    s.history->touch(node, node, out, elems * size_bytes(dtype), true, "a sum");
  }
};

template <>
struct attention_leaf<stream_model::ModelDevice> {
  using Stream = stream_model::ModelStream;

  static void forward(const AttentionForward& a, Stream s) {
    const int node = s.add();
    for (const TensorRef& in : {a.q, a.k, a.v}) s.history->touch(node, in, false, "forward's input");
    for (const TensorRef& state : {a.o_acc, a.lse}) s.history->touch(node, state, true, "forward's state");
    if (a.last) s.history->touch(node, a.out, true, "forward's output");
  }
  static void delta(const TensorRef& delta, const TensorRef& out, const TensorRef& dout, Stream s) {
    const int node = s.add();
    for (const TensorRef& in : {out, dout}) s.history->touch(node, in, false, "delta's input");
    s.history->touch(node, delta, true, "delta");
  }
  static void backward(const AttentionBackward& a, Stream s) {
    const int node = s.add();
    for (const TensorRef& in : {a.q, a.k, a.v, a.dout, a.lse, a.delta}) {
      s.history->touch(node, in, false, "backward's input");
    }
    for (const TensorRef& sum : {a.dq, a.dk, a.dv}) s.history->touch(node, sum, true, "backward's output");
    s.history->touch(node, node, a.workspace,
                     attention_workspace_bytes(a.q.extent(0), static_cast<int>(a.q.extent(2)), a.q.extent(1)), true,
                     "backward's workspace");
  }
  static void store(const TensorRef& out, std::span<const TensorRef> terms, Stream s) {
    const int node = s.add();
    for (const TensorRef& term : terms) s.history->touch(node, term, false, "what is stored");
    s.history->touch(node, out, true, "where it is stored");
  }
};

}  // namespace pleat::inline v0

namespace stream_model {
static_assert(executor<ModelExecutor> && communicator<ModelComm> && symmetric_arena<ModelArena>);
}  // namespace stream_model
