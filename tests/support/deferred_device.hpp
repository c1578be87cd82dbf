// A model of an asynchronous device: streams are queues that run later, in any order that events and signals allow. One
// thread plays all ranks; what is wrong about the order of a schedule's work shows as wrong values or as a deadlock.
#pragma once

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include <pleat/comm/communicator.hpp>
#include <pleat/comm/peer_access.hpp>
#include <pleat/core/host/buffer.hpp>
#include <pleat/core/host/leaf.hpp>

namespace testing_support {

struct deferred_device {};

/// Work in order; a piece of work that returns false waits and is tried again.
using WorkQueue = std::deque<std::function<bool()>>;

/// A handle on a queue; without one, work runs at once (what bind does).
struct DeferredStream {
  WorkQueue* queue = nullptr;

  bool operator==(const DeferredStream&) const = default;

  void enqueue(std::function<bool()> work) const {
    if (queue != nullptr) return queue->push_back(std::move(work));
    if (!work()) pleat::fail<pleat::error>("a wait without a stream");
  }
  void run(std::function<void()> work) const {
    enqueue([work = std::move(work)] { return work(), true; });
  }
};

struct DeferredEvent {
  /// Of each record, on whatever stream: whether it is done.
  using Records = std::deque<bool>;
  std::shared_ptr<Records> records = std::make_shared<Records>();
};

class DeferredExecutor {
 public:
  using device_type = deferred_device;
  using stream_type = DeferredStream;
  using event_type = DeferredEvent;

  pleat::Device device() const noexcept { return {}; }
  event_type make_event() const { return {}; }
  void record(event_type& event, stream_type s) const {
    event.records->push_back(false);
    s.run([records = event.records, &done = event.records->back()] { done = true; });
  }
  void wait(stream_type s, const event_type& event) const {
    if (event.records->empty()) return;
    s.enqueue([records = event.records, &done = std::as_const(event.records->back())] { return done; });
  }
  void copy(void* out, const void* in, std::size_t bytes, stream_type s) const {
    s.run([=, this] { host_.copy(out, in, bytes, {}); });
  }
  void copy_2d(void* out, std::size_t out_pitch_bytes, const void* in, std::size_t in_pitch_bytes,
               std::size_t width_bytes, std::size_t height, stream_type s) const {
    s.run([=, this] { host_.copy_2d(out, out_pitch_bytes, in, in_pitch_bytes, width_bytes, height, {}); });
  }
  void zero(void* out, std::size_t bytes, stream_type s) const {
    s.run([=, this] { host_.zero(out, bytes, {}); });
  }
  /// Asking is what lets a stream go on: one piece of work per question.
  bool is_idle(stream_type s) const {
    if (s.queue != nullptr && !s.queue->empty() && s.queue->front()()) s.queue->pop_front();
    return s.queue == nullptr || s.queue->empty();
  }

 private:
  pleat::HostExecutor host_;
};
static_assert(pleat::polling_executor<DeferredExecutor>);

/// Has a rank and a size only: for schedules on the peer path. One thread plays all ranks, which have the same plans:
/// what a rank tells the others when it binds is what it hears from them.
class DeferredComm {
 public:
  using device_type = deferred_device;
  using stream_type = DeferredStream;

  DeferredComm(int rank, int size) : rank_(rank), size_(size) {}
  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }
  DeferredComm split(int, int) { refuse(); }
  void all_gather(const void* in, void* out, std::size_t elems, pleat::DType dtype, stream_type s) {
    const std::size_t bytes = elems * pleat::size_bytes(dtype);
    for (int r = 0; r < size_; ++r) {
      if (r == rank_) continue;
      DeferredExecutor{}.copy(static_cast<std::byte*>(out) + static_cast<std::size_t>(r) * bytes, in, bytes, s);
    }
  }
  void all_gather_v(const void*, void*, pleat::Counts, pleat::DType, stream_type) { refuse(); }
  void all_to_all(const void*, void*, std::size_t, pleat::DType, stream_type) { refuse(); }
  void all_to_all_v(const void*, pleat::Counts, void*, pleat::Counts, pleat::DType, stream_type) { refuse(); }
  void broadcast(void*, std::size_t, int, pleat::DType, stream_type) { refuse(); }
  void exchange(std::span<const pleat::Send>, std::span<const pleat::Recv>, pleat::DType, stream_type) { refuse(); }
  void barrier(stream_type) { refuse(); }
  void wait(stream_type s) {
    while (!DeferredExecutor{}.is_idle(s)) {
    }
  }

 private:
  [[noreturn]] static void refuse() { pleat::fail<pleat::comm_error>("a collective on the peer path"); }
  int rank_;
  int size_;
};
static_assert(pleat::communicator<DeferredComm>);

/// The queues, memory and signals of all ranks.
class DeferredWorld {
 public:
  DeferredWorld(int ranks, std::size_t arena_bytes) {
    for (int r = 0; r < ranks; ++r) blocks_.emplace_back(arena_bytes, static_cast<unsigned char>(0xff));
  }
  DeferredStream make_stream() { return {&queues_.emplace_back()}; }

  /// Runs everything: again and again some queue, for some pieces of work, until all are empty.
  /// Errors: pleat::error when nobody can go on.
  template <class Random>
  void run(Random& random) {
    std::vector<WorkQueue*> open;
    for (WorkQueue& queue : queues_) open.push_back(&queue);
    while (true) {
      std::erase_if(open, [](WorkQueue* queue) { return queue->empty(); });
      if (open.empty()) return;
      std::shuffle(open.begin(), open.end(), random);
      bool any = false;
      for (WorkQueue* queue : open) {
        for (auto burst = 1 + random() % 64; burst > 0 && !queue->empty() && queue->front()(); --burst) {
          queue->pop_front();
          any = true;
        }
        if (any) break;
      }
      if (!any) pleat::fail<pleat::error>("deadlock: ", open.size(), " streams wait");
    }
  }

  std::byte* block(int rank) { return blocks_[static_cast<std::size_t>(rank)].data(); }
  int& signals(int from, int to, int channel) { return signals_[{from, to, channel}]; }

 private:
  std::deque<WorkQueue> queues_;
  std::vector<pleat::HostBuffer> blocks_;
  std::map<std::tuple<int, int, int>, int> signals_;
};

/// A group's window on the world's memory.
class DeferredPeers {
 public:
  using device_type = deferred_device;
  using stream_type = DeferredStream;

  DeferredPeers(DeferredWorld& world, const pleat::Group& group, int rank, std::size_t offset, int first_channel)
      : world_(&world), group_(group), rank_(rank), offset_(offset), first_channel_(first_channel) {}
  int rank() const noexcept { return rank_; }
  int size() const noexcept { return group_.size(); }
  std::byte* base(int peer) const { return world_->block(group_[peer]) + offset_; }
  void signal(int peer, int channel, stream_type s) {
    s.run([this_world = world_, from = group_[rank_], to = group_[peer], at = first_channel_ + channel] {
      ++this_world->signals(from, to, at);
    });
  }
  void await(int peer, int channel, stream_type s) {
    const int wanted = ++awaited_[{peer, channel}];
    s.enqueue([=, this_world = world_, from = group_[peer], to = group_[rank_], at = first_channel_ + channel] {
      return this_world->signals(from, to, at) >= wanted;
    });
  }

 private:
  DeferredWorld* world_;
  pleat::Group group_;
  int rank_;
  std::size_t offset_;
  int first_channel_;
  std::map<std::pair<int, int>, int> awaited_;
};

class DeferredArena {
 public:
  DeferredArena(DeferredWorld& world, int rank) : world_(&world), rank_(rank) {}
  bool reachable(const pleat::Group&) const { return true; }
  DeferredPeers open(const pleat::Group& group, std::size_t bytes, int channels) {
    DeferredPeers peers(*world_, group, group.index_of(rank_), used_bytes_, used_channels_);
    used_bytes_ += (bytes + 127) / 128 * 128;
    used_channels_ += channels;
    return peers;
  }

 private:
  DeferredWorld* world_;
  int rank_;
  std::size_t used_bytes_ = 0;
  int used_channels_ = 0;
};
static_assert(pleat::symmetric_arena<DeferredArena>);

}  // namespace testing_support

template <>
inline constexpr pleat::DeviceKind pleat::device_kind<testing_support::deferred_device> = pleat::DeviceKind::host;
template <>
struct pleat::detail::ExecutorFor<testing_support::deferred_device> {
  using type = testing_support::DeferredExecutor;
};

/// The host's leaves, later; pointers to parts are taken when the work is enqueued, as a kernel's arguments are.
template <>
struct pleat::core_leaf<testing_support::deferred_device> {
  using stream_type = testing_support::DeferredStream;
  using host = pleat::core_leaf<pleat::host_device>;

  static void cast_copy(void* out, DType out_dtype, const void* in, DType in_dtype, std::size_t elems, stream_type s) {
    s.run([=] { host::cast_copy(out, out_dtype, in, in_dtype, elems, {}); });
  }
  static void sum_ranks(void* out, DType out_dtype, std::span<const void* const> parts, DType part_dtype,
                        std::size_t elems, bool accumulate, stream_type s, int = 0) {
    s.run([=, copied = std::vector<const void*>(parts.begin(), parts.end())] {
      host::sum_ranks(out, out_dtype, copied, part_dtype, elems, accumulate, {});
    });
  }
  static void sum_of_squares(double* out, const void* in, DType dtype, std::size_t elems, bool accumulate,
                             void* scratch, stream_type s) {
    s.run([=] { host::sum_of_squares(out, in, dtype, elems, accumulate, scratch, {}); });
  }
};
