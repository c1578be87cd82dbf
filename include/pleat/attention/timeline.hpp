// When each part of a ring's pass runs, by the cost model: its schedule is run with an executor that adds up times.
#pragma once

#include <deque>
#include <map>
#include <string>

#include <pleat/attention/ring_pushes.hpp>
#include <pleat/attention/ring_rehearsal.hpp>

namespace pleat::inline v0::ring {

/// How fast a rank computes and sends.
struct RingRates {
  double flops = 600e12;            // FLOP/s of the kernels of forward
  double backward_flops = 500e12;   // and of backward
  double bytes_per_second = 340e9;  // of a rank's copies to others, one way
  double launch_seconds = 5e-6;     // of a kernel that nothing else covers
};

/// Which pass of attention.
enum class Pass : unsigned char { forward, backward };

/// What a rank does for some time.
struct TimelineSpan {
  int rank = 0;
  bool is_transfer = false;   // on the stream of communication, else on that of computation
  double begin = 0, end = 0;  // seconds
  std::string label;
};

namespace detail {

/// What all ranks do, in the order of each stream; when it happens follows once all is known.
class TimelineGraph {
 public:
  using Flag = const std::uint64_t*;
  TimelineGraph(int ranks, int channels)
      : ranks_(ranks),
        flags_(static_cast<std::size_t>(channels) * static_cast<std::size_t>(ranks) * static_cast<std::size_t>(ranks)) {
  }

  /// Where a rank's signals to another arrive, in a row of all pairs per channel.
  Flag flag(int from, int to, int channel) const {
    const std::ptrdiff_t pairs = static_cast<std::ptrdiff_t>(ranks_) * ranks_;
    return flags_.data() + channel * pairs + static_cast<std::ptrdiff_t>(from) * ranks_ + to;
  }
  int add(int stream, double seconds = 0, std::string label = {}) {
    const int node = static_cast<int>(nodes_.size());
    const auto [last, is_first] = last_.try_emplace(stream, node);
    nodes_.push_back({stream, seconds, std::move(label), {}});
    if (!is_first) order(last->second, node);
    last->second = node;
    return node;
  }
  void order(int earlier, int later) { nodes_[static_cast<std::size_t>(later)].after.push_back(earlier); }
  /// Signals and the awaits that they answer.
  void signal(Flag flag, int node) { signals_[flag].push_back(node); }
  void await(Flag flag, int node) { awaits_[flag].push_back(node); }
  /// The next await of the flag will be answered by the signal of this number.
  std::size_t awaited(Flag flag) { return awaits_[flag].size(); }
  /// `node` waits for that signal too.
  void peek(Flag flag, std::size_t number, int node) { peeks_.push_back({flag, number, node}); }

  std::vector<TimelineSpan> spans() {
    for (const auto& [flag, waits] : awaits_) {
      for (std::size_t i = 0; i < waits.size(); ++i) order(signals_.at(flag).at(i), waits[i]);
    }
    for (const auto& [flag, number, node] : peeks_) order(signals_.at(flag).at(number), node);
    std::vector<double> ends(nodes_.size(), -1);
    std::vector<TimelineSpan> spans;
    for (bool moves = true; moves;) {  // those whose ends are known set others free
      moves = false;
      for (std::size_t i = 0; i < nodes_.size(); ++i) {
        const Node& node = nodes_[i];
        double begin = 0;
        bool is_free = ends[i] < 0;
        for (const int earlier : node.after) {
          const double end = ends[static_cast<std::size_t>(earlier)];
          is_free = is_free && end >= 0;
          begin = std::max(begin, end);
        }
        if (!is_free) continue;
        moves = true;
        ends[i] = begin + node.seconds;
        if (node.seconds > 0) spans.push_back({node.stream / 2, node.stream % 2 == 1, begin, ends[i], node.label});
      }
    }
    return spans;
  }

 private:
  struct Node {
    int stream;  // rank * 2, and 1 more for communication
    double seconds;
    std::string label;
    std::vector<int> after;
  };
  struct Peek {
    Flag flag;
    std::size_t number;
    int node;
  };
  std::vector<Node> nodes_;
  std::map<int, int> last_;  // node of each stream
  std::map<Flag, std::vector<int>> signals_, awaits_;
  std::vector<Peek> peeks_;
  int ranks_;
  std::vector<std::uint64_t> flags_;
};

/// What the parts of a rank share: where to write, how fast it all is, and what is being done.
struct TimelineNotes {
  TimelineGraph* graph;
  RingRates rates;
  std::string label;
};

struct TimelineExecutor {
  struct device_type {};
  using stream_type = int;
  struct event_type {
    int node = -1;
  };

  Device device() const { return {DeviceKind::host, 0}; }
  event_type make_event() const { return {}; }
  void record(event_type& event, int s) const { event.node = notes->graph->add(s); }
  void wait(int s, const event_type& event) const {
    const int node = notes->graph->add(s);
    if (event.node >= 0) notes->graph->order(event.node, node);
  }
  void copy(void*, const void*, std::size_t bytes, int s) const {
    notes->graph->add(s, static_cast<double>(bytes) / notes->rates.bytes_per_second, notes->label);
  }
  void copy_2d(void*, std::size_t, const void*, std::size_t, std::size_t width, std::size_t height, int s) const {
    copy(nullptr, nullptr, width * height, s);
  }
  void zero(void*, std::size_t, int) const {}

  TimelineNotes* notes;
};

/// Peers whose memory nobody touches.
class TimelinePeers {
 public:
  using device_type = TimelineExecutor::device_type;
  using stream_type = int;
  struct NextSignal {
    const std::uint64_t* word;
    std::uint64_t at_least;
  };

  TimelinePeers(TimelineGraph& graph, std::byte* anywhere, int rank, int size)
      : graph_(&graph), anywhere_(anywhere), rank_(rank), size_(size) {}
  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }
  std::byte* base(int) const { return anywhere_; }
  void signal(int peer, int channel, int s) { graph_->signal(graph_->flag(rank_, peer, channel), graph_->add(s)); }
  void await(int peer, int channel, int s) { graph_->await(graph_->flag(peer, rank_, channel), graph_->add(s)); }
  NextSignal next_signal(int peer, int channel) const {
    const TimelineGraph::Flag word = graph_->flag(peer, rank_, channel);
    return {word, graph_->awaited(word)};
  }
  int words_per_channel() const { return size_ * size_; }

 private:
  TimelineGraph* graph_;
  std::byte* anywhere_;
  int rank_, size_;
};
static_assert(peer_access<TimelinePeers>);

/// The peer transport, which says what is under way.
class TimelineTransport : public RingPushes<TimelineExecutor, TimelinePeers> {
  using Base = RingPushes<TimelineExecutor, TimelinePeers>;

 public:
  TimelineTransport(const std::shared_ptr<const Plan>& plan, const TimelineExecutor& executor, TimelinePeers peers)
      : Base(plan, executor, peers, 2 * peers.rank()), notes_(executor.notes), rank_(peers.rank()), cp_(plan->cp) {}
  void post(int step, const StreamPair& s) {
    const std::string computed = notes_->label;
    notes_->label = "to " + rank_at(step);
    Base::post(step, s);
    notes_->label = computed;
  }
  KeyValueBlock part(int step, TokenSpan keys) const {
    notes_->label = "block " + rank_at(-step);
    return Base::part(step, keys);
  }
  void pass(int step, int slice, const StreamPair& s) {
    notes_->label = "sum of " + rank_at(-step) + " to " + rank_at(1);
    Base::pass(step, slice, s);
    notes_->label = "own";
  }
  void gather(const StreamPair& s) {
    notes_->label = "to all";
    Base::gather(s);
    notes_->label = "all blocks";
  }

 private:
  /// So many places after this rank.
  std::string rank_at(int places) const { return std::to_string(cyclic(rank_, places, cp_)); }

  TimelineNotes* notes_;
  int rank_, cp_;
};

struct TimelineLeaf {
  void forward(const AttentionForward& call, int s) const {
    notes->graph->add(s, seconds(call.q, call.work, flops_of_pair(call.q, call.v, 1, 1), notes->rates.flops),
                      notes->label);
  }
  /// Group of heads by group of heads, each when its rows are there.
  bool forward(const AttentionForwardBlocks& all, int s) const {
    const AttentionForward& call = all.call;
    const Arrivals& arrivals = all.arrivals;
    const auto groups = static_cast<int>((all.k.extent(2) + arrivals.heads_per_word - 1) / arrivals.heads_per_word);
    const double time = seconds(call.q, call.work, flops_of_pair(call.q, call.v, 1, 1), notes->rates.flops) / groups;
    for (int group = 0; group < groups; ++group) {
      const int node = notes->graph->add(s, time, group == 0 ? notes->label : "");
      for (int block = 0; block < Arrivals::most_blocks && arrivals.words[block] != nullptr; ++block) {
        notes->graph->peek(arrivals.words[block] + group * arrivals.word_stride, arrivals.at_least, node);
      }
    }
    return true;
  }
  void backward(const AttentionBackward& call, int s) const {
    notes->graph->add(s, seconds(call.q, call.work, flops_of_pair(call.q, call.v, 3, 2), notes->rates.backward_flops),
                      notes->label);
  }
  void delta(const TensorRef&, const TensorRef&, const TensorRef&, int) const {}
  void store(const TensorRef&, std::span<const TensorRef>, int) const {}

  /// So many products along the head dim of queries and keys, and of values.
  static double flops_of_pair(const TensorRef& q, const TensorRef& v, double along_qk, double along_v) {
    return 2 * (along_qk * static_cast<double>(q.extent(3)) + along_v * static_cast<double>(v.extent(3)));
  }
  double seconds(const TensorRef& q, const WorkView& work, double flops_of_pair, double flops) const {
    double pairs = 0;
    for (const Rectangle& r : work) {
      for (std::int64_t query = r.q0; query < r.q1; ++query) pairs += static_cast<double>(r.keys_end(query) - r.k0);
    }
    const auto heads = static_cast<double>(q.extent(0) * q.extent(2));
    return notes->rates.launch_seconds + heads * pairs * flops_of_pair / flops;
  }

  TimelineNotes* notes;
};

}  // namespace detail

/// What every rank does in one pass of `plan` by peer transport, as its schedule says and the rates allow; all begin at
/// 0. No two copies share a wire. Not for plans of latents, which a user's code expands.
inline std::vector<TimelineSpan> timeline(Plan plan, const RingRates& rates, Pass pass) {
  plan.transport = Transport::peer;
  const auto shared = std::make_shared<const Plan>(std::move(plan));
  const Shape& shape = shared->shape;
  detail::TimelineGraph graph(shared->cp, detail::push_channels(*shared));
  struct alignas(Carver::alignment_bytes) Chunk {
    std::byte bytes[Carver::alignment_bytes];
  };
  std::vector<Chunk> memory(shared->work.placed_bytes() / sizeof(Chunk) + 1);
  std::byte* const anywhere = memory.front().bytes;  // of all that is neither read nor written
  std::deque<detail::TimelineNotes> notes;
  for (int rank = 0; rank < shared->cp; ++rank) {
    const detail::TimelineExecutor executor{&notes.emplace_back(detail::TimelineNotes{&graph, rates, "own"})};
    const auto of = [&](int heads, int dim, DType dtype) {
      return TensorRef(anywhere, dtype, {shape.batch, shared->local_tokens(rank), heads, dim}, executor.device());
    };
    const KeyValueBlock own{of(shape.kv_heads, shape.qk_dim, shape.dtype),
                            of(shape.kv_heads, shape.v_dim, shape.dtype)};
    const detail::RingTensors tensors{of(shape.q_heads, shape.qk_dim, shape.dtype), own,
                                      of(shape.q_heads, shape.v_dim, shape.dtype), of(shape.q_heads, 1, DType::f32)};
    const Streams<int> s{2 * rank, 2 * rank + 1};
    const Block list{anywhere, memory.size() * sizeof(Chunk)};
    using Idle = detail::IdleExecutor<detail::TimelineExecutor>;
    const PlacedWork work(shared->work, rank, list, list, Idle(executor.device()), s.compute);
    detail::TimelineTransport transport(shared, executor, {graph, anywhere, rank, shared->cp});
    const detail::RingSchedule<detail::TimelineExecutor, detail::TimelineLeaf> schedule(
        shared, executor, rank, {anywhere, shared->footprint().scratch}, detail::TimelineLeaf{executor.notes});
    if (pass == Pass::forward) {
      schedule.forward(transport, s, work, tensors);
    } else {
      schedule.backward(transport, s, work, tensors, {tensors.out, tensors.q, own});
    }
  }
  return graph.spans();
}

}  // namespace pleat::inline v0::ring
