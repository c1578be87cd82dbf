// Archetypes: the least that satisfies the concepts of communicators and windows, so that code that needs more fails to
// compile. They note what they are asked for.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <pleat/comm/communicator.hpp>
#include <pleat/comm/peer_access.hpp>
#include <pleat/core/host/executor.hpp>
#include <pleat/core/host/leaf.hpp>

namespace testing_support {

/// A device of its own: neither host nor CUDA.
struct archetype_device {};

/// A stream that cannot be made from nothing.
class ArchetypeStream {
 public:
  explicit ArchetypeStream(int id) : id_(id) {}
  int id() const { return id_; }

 private:
  int id_;
};

using Log = std::vector<std::string>;

/// A rank whose peers all hold what it holds. Neither copyable nor default constructible.
class ArchetypeComm {
 public:
  using device_type = archetype_device;
  using stream_type = ArchetypeStream;

  ArchetypeComm(Log& log, int rank, int size) : log_(&log), rank_(rank), size_(size) {}
  ArchetypeComm(ArchetypeComm&&) = default;
  ArchetypeComm& operator=(ArchetypeComm&&) = default;

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }
  /// A group of two, in which this rank's place is `key`.
  ArchetypeComm split(int color, int key) {
    log_->push_back(pleat::message_of("split ", color, " ", key).c_str());
    return ArchetypeComm(*log_, key, 2);
  }
  void all_gather(const void* in, void* out, std::size_t elems, pleat::DType t, ArchetypeStream s) {
    note("all_gather", elems, t, s);
    for (int r = 0; r < size_; ++r) copy(at(out, r * elems, t), in, elems, t);
  }
  void all_gather_v(const void* in, void* out, pleat::Counts n, pleat::DType t, ArchetypeStream s) {
    note("all_gather_v", n[me()], t, s);
    copy(at(out, before(n, rank_), t), in, n[me()], t);
  }
  void all_to_all(const void* in, void* out, std::size_t elems, pleat::DType t, ArchetypeStream s) {
    note("all_to_all", elems, t, s);
    for (int r = 0; r < size_; ++r) copy(at(out, r * elems, t), at(in, me() * elems, t), elems, t);
  }
  void all_to_all_v(const void* in, pleat::Counts send, void* out, pleat::Counts recv, pleat::DType t,
                    ArchetypeStream s) {
    note("all_to_all_v", recv[me()], t, s);
    for (int r = 0; r < size_; ++r) {
      copy(at(out, before(recv, r), t), at(in, before(send, rank_), t), recv[static_cast<std::size_t>(r)], t);
    }
  }
  void broadcast(void*, std::size_t elems, int root, pleat::DType t, ArchetypeStream s) {
    note(root == 0 ? "broadcast of 0" : "broadcast of another", elems, t, s);
  }
  void exchange(std::span<const pleat::Send> tx, std::span<const pleat::Recv> rx, pleat::DType t, ArchetypeStream s) {
    note("exchange", tx.size() * 10 + rx.size(), t, s);
  }
  void barrier(ArchetypeStream s) { note("barrier", 0, pleat::DType::u8, s); }
  void wait(ArchetypeStream s) { note("wait", 0, pleat::DType::u8, s); }

 private:
  std::size_t me() const { return static_cast<std::size_t>(rank_); }
  static std::size_t before(pleat::Counts counts, int rank) {
    std::size_t sum = 0;
    for (int r = 0; r < rank; ++r) sum += counts[static_cast<std::size_t>(r)];
    return sum;
  }
  static std::byte* at(void* base, std::size_t elems, pleat::DType t) {
    return static_cast<std::byte*>(base) + elems * size_bytes(t);
  }
  static const std::byte* at(const void* base, std::size_t elems, pleat::DType t) {
    return static_cast<const std::byte*>(base) + elems * size_bytes(t);
  }
  static void copy(void* out, const void* in, std::size_t elems, pleat::DType t) {
    if (out != in) pleat::HostExecutor{}.copy(out, in, elems * size_bytes(t), {});
  }
  void note(const char* operation, std::size_t elems, pleat::DType t, ArchetypeStream s) {
    log_->push_back(pleat::message_of(operation, " ", elems, " ", t, " on ", s.id()).c_str());
  }

  Log* log_;
  int rank_, size_;
};
static_assert(pleat::communicator<ArchetypeComm> && !pleat::native_reductions<ArchetypeComm>);
static_assert(!std::copyable<ArchetypeComm> && !std::default_initializable<ArchetypeComm>);

/// A window of one rank that counts its own signals.
class ArchetypePeers {
 public:
  using device_type = archetype_device;
  using stream_type = ArchetypeStream;

  explicit ArchetypePeers(std::size_t bytes) : memory_(new std::byte[bytes]) {}
  int rank() const noexcept { return 0; }
  int size() const noexcept { return 1; }
  std::byte* base(int) const { return memory_.get(); }
  void signal(int, int, ArchetypeStream) { ++signals_; }
  void await(int, int, ArchetypeStream) { --signals_; }

 private:
  std::unique_ptr<std::byte[]> memory_;
  int signals_ = 0;
};
static_assert(pleat::peer_access<ArchetypePeers>);

class ArchetypeArena {
 public:
  bool reachable(const pleat::Group& group) const { return group.size() == 1; }
  ArchetypePeers open(const pleat::Group&, std::size_t bytes, int) { return ArchetypePeers(bytes); }
};
static_assert(pleat::symmetric_arena<ArchetypeArena>);

/// The executor of the archetype's device: nothing that the concept does not ask for.
struct ArchetypeExecutor {
  using device_type = archetype_device;
  using stream_type = ArchetypeStream;
  struct event_type {};

  pleat::Device device() const { return {}; }
  event_type make_event() const { return {}; }
  void record(event_type&, ArchetypeStream) const {}
  void wait(ArchetypeStream, const event_type&) const {}
  void copy(void* out, const void* in, std::size_t bytes, ArchetypeStream) const {
    pleat::HostExecutor{}.copy(out, in, bytes, {});
  }
  void copy_2d(void* out, std::size_t out_pitch, const void* in, std::size_t in_pitch, std::size_t width,
               std::size_t height, ArchetypeStream) const {
    pleat::HostExecutor{}.copy_2d(out, out_pitch, in, in_pitch, width, height, {});
  }
  void zero(void* out, std::size_t bytes, ArchetypeStream) const { pleat::HostExecutor{}.zero(out, bytes, {}); }
};
static_assert(pleat::executor<ArchetypeExecutor>);

}  // namespace testing_support

template <>
struct pleat::detail::ExecutorFor<testing_support::archetype_device> {
  using type = testing_support::ArchetypeExecutor;
};
template <>
struct pleat::core_leaf<testing_support::archetype_device> {
  using Stream = testing_support::ArchetypeStream;
  using leaf = core_leaf<host_device>;
  static void cast_copy(void* out, DType out_dtype, const void* in, DType in_dtype, std::size_t elems, Stream) {
    leaf::cast_copy(out, out_dtype, in, in_dtype, elems, {});
  }
  static void sum_ranks(void* out, DType out_dtype, std::span<const void* const> parts, DType part_dtype,
                        std::size_t elems, bool accumulate, Stream, int = 0) {
    leaf::sum_ranks(out, out_dtype, parts, part_dtype, elems, accumulate, {});
  }
  static void sum_of_squares(double* out, const void* in, DType dtype, std::size_t elems, bool accumulate,
                             void* scratch, Stream) {
    leaf::sum_of_squares(out, in, dtype, elems, accumulate, scratch, {});
  }
};
