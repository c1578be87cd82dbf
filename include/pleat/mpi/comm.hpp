// MpiComm: the communicator of ranks that are processes on host memory, started by MPI.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include <pleat/comm/call_agreement.hpp>
#include <pleat/comm/call_checks.hpp>
#include <pleat/comm/job.hpp>
#include <pleat/comm/own_messages.hpp>
#include <pleat/core/host/executor.hpp>
#include <pleat/mpi/calls.hpp>
#include <pleat/mpi/link.hpp>
#include <pleat/mpi/transfer.hpp>

namespace pleat::inline v0 {

/// Options of a world of MPI.
struct MpiOptions {
  /// How long a rank waits for a peer before the job fails (C04).
  std::chrono::milliseconds deadline = std::chrono::seconds(120);
};

/// A communicator over MPI; operations are complete on return. Every collective begins with all ranks telling each
/// other what they call, so that calls that disagree are refused on every rank (C05) before anything moves.
///
/// MPI alone would wait for ever. Here a rank polls: a peer that throws ends its waits with C02, one that returns with
/// C03, one that is not there within the deadline with C04; then every later operation of the job throws, and MPI may
/// hold messages that nobody takes. So after a failure a program ends without MPI_Finalize, as `run_mpi_process` does.
/// When a process dies, MPI ends the others. Copies are handles on the same communicator; one thread uses them. MPI's
/// memory for groups goes with MPI_Finalize, before which the last handle must be gone.
class MpiComm {
 public:
  using device_type = host_device;
  using stream_type = HostStream;

  /// A world over the ranks of `comm`, which all call, after MPI_Init. Errors: comm_error C37, C35.
  static MpiComm create(MPI_Comm comm, MpiOptions options = {}) {
    auto job = std::make_shared<Job>(std::make_unique<MpiLink>(comm), options.deadline);
    std::vector<int> everybody;
    for (int r = 0; r < job->size(); ++r) everybody.push_back(r);
    const int rank = job->rank();
    return MpiComm(std::make_shared<Group>(Group{std::move(job), detail::duplicate(comm), std::move(everybody), rank}));
  }

  // No moves: what is moved from stays a handle.
  MpiComm(const MpiComm&) = default;
  MpiComm& operator=(const MpiComm&) = default;

  int rank() const noexcept { return group_->rank; }
  int size() const noexcept { return static_cast<int>(group_->members.size()); }
  /// The ranks of this group, as ranks of the job; and what this rank knows of the job.
  const std::vector<int>& world_ranks() const noexcept { return group_->members; }
  Job& job() const noexcept { return *group_->job; }

  [[nodiscard]] MpiComm split(int color, int key) {
    const auto colors =
        agree({.operation = "split", .elems = static_cast<std::size_t>(key), .root = color, .must_agree = false});
    std::vector<int> places;
    for (int r = 0; r < size(); ++r) {
      if (colors.of(r).root == color) places.push_back(r);
    }
    const int first = places.front();  // stands for the color, which MPI wants not to be negative
    const auto key_of = [&](int r) { return static_cast<int>(colors.of(r).elems); };
    std::stable_sort(places.begin(), places.end(), [&](int a, int b) { return key_of(a) < key_of(b); });
    Group child{group_->job, MPI_COMM_NULL, {}, 0, Group::mix(group_->id, ++group_->splits, first)};
    for (const int r : places) child.members.push_back(group_->members[static_cast<std::size_t>(r)]);
    child.rank = static_cast<int>(std::find(places.begin(), places.end(), rank()) - places.begin());
    check_mpi(MPI_Comm_split(group_->comm, first, child.rank, &child.comm), "MPI_Comm_split");
    check_mpi(MPI_Comm_set_errhandler(child.comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    return MpiComm(std::make_shared<Group>(std::move(child)));
  }

  void all_gather(const void* in, void* out, std::size_t elems, DType dtype, HostStream = {}) {
    const detail::Call call{.operation = "all_gather", .dtype = dtype, .elems = elems};
    collective(call, [&] {
      const std::size_t bytes = elems * size_bytes(dtype);
      const auto mine = [&](std::size_t) { return Part{0, bytes}; };
      move(in, bytes, mine, out, [&](std::size_t r) { return Part{r * bytes, bytes}; });
    });
  }
  void all_gather_v(const void* in, void* out, Counts counts, DType dtype, HostStream = {}) {
    const detail::Call call{.operation = "all_gather_v", .dtype = dtype, .recv = counts, .count_lists = 1};
    collective(call, [&] {
      const Parts parts = parts_of(counts, dtype);
      const std::size_t bytes = parts[static_cast<std::size_t>(rank())].bytes;
      const auto mine = [&](std::size_t) { return Part{0, bytes}; };
      move(in, bytes, mine, out, [&](std::size_t r) { return parts[r]; });
    });
  }
  void all_to_all(const void* in, void* out, std::size_t elems, DType dtype, HostStream = {}) {
    const detail::Call call{.operation = "all_to_all", .dtype = dtype, .elems = elems};
    collective(call, [&] {
      const std::size_t bytes = elems * size_bytes(dtype);
      const auto block = [&](std::size_t r) { return Part{r * bytes, bytes}; };
      move(in, bytes * group_->members.size(), block, out, block);
    });
  }
  void all_to_all_v(const void* in, Counts send, void* out, Counts recv, DType dtype, HostStream = {}) {
    const detail::Call call{.operation = "all_to_all_v", .dtype = dtype, .send = send, .recv = recv, .count_lists = 2};
    collective(call, [&] {
      const Parts sent = parts_of(send, dtype), received = parts_of(recv, dtype);
      const std::size_t bytes = sent.back().offset + sent.back().bytes;
      move(
          in, bytes, [&](std::size_t r) { return sent[r]; }, out, [&](std::size_t r) { return received[r]; });
    });
  }
  /// Errors: comm_error C05 on every rank when the roots differ or name no rank.
  void broadcast(void* buffer, std::size_t elems, int root, DType dtype, HostStream = {}) {
    const detail::Call call{.operation = "broadcast", .dtype = dtype, .elems = elems, .root = root};
    collective(call, [&] {
      const std::size_t bytes = elems * size_bytes(dtype);
      const bool is_root = root == rank();
      const auto sent = [&](std::size_t) { return Part{0, is_root ? bytes : 0}; };
      const auto received = [&](std::size_t r) { return Part{0, static_cast<int>(r) == root ? bytes : 0}; };
      move(buffer, is_root ? bytes : 0, sent, buffer, received);
    });
  }

  /// Returns when the receivers have come for what was sent. Errors: comm_error C06 on the receiver when a message and
  /// its receive differ, which ends the job where it is not caught; C06 when a peer is no rank, or messages to oneself
  /// do not match.
  void exchange(std::span<const Send> tx, std::span<const Recv> rx, DType dtype, HostStream = {});

  void barrier(HostStream = {}) {
    collective({.operation = "barrier"}, [] {});
  }
  /// Errors: comm_error C02 when a rank has failed.
  void wait(HostStream = {}) { check(); }

  /// Looks for failures without waiting. Errors: comm_error C02.
  void check() { job().check(); }
  /// Ends the job because of this rank, for a program that catches what its rank throws: `why` reaches all others.
  void abandon(const char* why) noexcept { job().fail(why); }

 private:
  /// One group of ranks, on one of them.
  struct Group {
    std::shared_ptr<Job> job;
    MPI_Comm comm;
    std::vector<int> members;  // ranks of the job
    int rank = 0;
    std::uint64_t id = 0;
    std::uint64_t splits = 0;
    std::unique_ptr<detail::MpiTransfer> transfer = std::make_unique<detail::MpiTransfer>();

    /// source: Steele, Lea and Flood's finalizer of SplitMix, doi 10.1145/2660193.2660195.
    static std::uint64_t mix(std::uint64_t id, std::uint64_t split, int first) {
      std::uint64_t z =
          (id * 0x9e3779b97f4a7c15U + split) * 0x9e3779b97f4a7c15U + static_cast<std::uint64_t>(first) + 1;
      z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
      z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
      return z ^ (z >> 31);
    }
  };
  /// Bytes of a packed buffer that go to, or come from, one rank.
  struct Part {
    std::size_t offset, bytes;
  };
  using Parts = std::vector<Part>;
  enum Tag : int { collective_tag = 1, header_tag, message_tag };

  explicit MpiComm(std::shared_ptr<Group> group) : group_(std::move(group)) {}

  static Parts parts_of(Counts counts, DType dtype) {
    Parts parts;
    std::size_t offset = 0;
    for (const std::size_t elems : counts) {
      parts.push_back({offset, elems * size_bytes(dtype)});
      offset += parts.back().bytes;
    }
    return parts;
  }

  /// What all collectives do: the ranks' calls meet and agree, then `f` moves.
  template <class F>
  void collective(const detail::Call& call, F f) {
    (void)detail::bytes_of(call.operation, call.elems, call.dtype, size());
    for (const Counts counts : {call.send, call.recv}) detail::check_counts(call.operation, counts, call.dtype);
    (void)agree(call);
    f();
  }
  /// Every rank's call. Errors: comm_error C05 on every rank when they disagree; C02, C03, C04.
  detail::GatheredCalls agree(const detail::Call& call) {
    job().enter(call.operation);
    const std::uint64_t tag = group_->id | std::uint64_t{1} << 63;
    detail::GatheredCalls calls(job().meet(group_->members, tag, detail::packed(call)));
    const Message disagreement = detail::Calls{calls.all(), group_->members}.disagreement();
    if (disagreement.size() != 0) throw comm_error(disagreement);
    return calls;
  }

  /// send(r) of `in` [in_bytes] goes to rank r; receive(r) of `out` comes from it. The calls agree.
  template <class SendPart, class ReceivePart>
  void move(const void* in, std::size_t in_bytes, SendPart send, void* out, ReceivePart receive) {
    const auto n = group_->members.size(), me = static_cast<std::size_t>(rank());
    std::size_t received_bytes = 0;
    for (std::size_t r = 0; r < n; ++r) received_bytes += r == me ? 0 : receive(r).bytes;
    detail::MpiTransfer& transfer = *group_->transfer;
    transfer.begin(in_bytes, received_bytes);
    copy(transfer.sent(0), in, in_bytes);
    for_others(n, me, receive, [&](std::size_t r, std::size_t at, const Part& part) {
      transfer.receive(group_->comm, static_cast<int>(r), collective_tag, at, part.bytes);
    });
    for_others(n, me, send, [&](std::size_t r, std::size_t, const Part& part) {
      transfer.send(group_->comm, static_cast<int>(r), collective_tag, part.offset, part.bytes);
    });
    finish([&] { return transfer.is_done(); });
    auto* const to = static_cast<std::byte*>(out);
    for_others(n, me, receive, [&](std::size_t, std::size_t at, const Part& part) {
      copy(to + part.offset, transfer.received(at), part.bytes);
    });
    if (receive(me).bytes != 0) copy(to + receive(me).offset, transfer.sent(send(me).offset), receive(me).bytes);
  }
  /// f(r, at, part) for the other ranks; `at` is where the part is when all are packed.
  template <class PartOf, class F>
  static void for_others(std::size_t n, std::size_t me, PartOf part_of, F f) {
    std::size_t at = 0;
    for (std::size_t r = 0; r < n; ++r) {
      if (r == me) continue;
      const Part part = part_of(r);
      f(r, at, part);
      at += part.bytes;
    }
  }
  /// Waits until `done()`. What is under way when a wait fails is left to MPI, with its memory.
  template <class Done>
  void finish(Done done) {
    const auto missing = [&] {
      std::vector<int> ranks = group_->transfer->missing();
      for (int& r : ranks) r = group_->members[static_cast<std::size_t>(r)];
      std::sort(ranks.begin(), ranks.end());
      return ranks;
    };
    try {
      job().wait_until(done, group_->members, missing);
    } catch (...) {
      (void)group_->transfer.release();
      group_->transfer = std::make_unique<detail::MpiTransfer>();
      throw;
    }
  }
  static void copy(void* out, const void* in, std::size_t bytes) {
    if (bytes != 0 && out != in) std::memmove(out, in, bytes);
  }

  std::shared_ptr<Group> group_;
};

inline void MpiComm::exchange(std::span<const Send> tx, std::span<const Recv> rx, DType dtype, HostStream) {
  struct Header {
    std::uint64_t elems;
    DType dtype;
  };
  job().enter("exchange");
  std::size_t sent_bytes = tx.size() * sizeof(Header), received_bytes = rx.size() * sizeof(Header);
  const auto check_message = [&](int peer, std::size_t elems) {
    const std::size_t bytes = detail::bytes_of("exchange", elems, dtype);
    if (peer >= 0 && peer < size()) return bytes;
    fail<comm_error>("pleat[C06]: exchange with peer ", peer, "; valid peers: 0 to ", size() - 1);
  };
  for (const Send& send : tx) sent_bytes += check_message(send.peer, send.elems);
  for (const Recv& recv : rx) received_bytes += check_message(recv.peer, recv.elems);
  const int world_rank = group_->members[static_cast<std::size_t>(rank())];
  detail::check_own_messages(rank(), world_rank, tx, rx);

  const std::size_t width = size_bytes(dtype);
  detail::MpiTransfer& transfer = *group_->transfer;
  transfer.begin(sent_bytes, received_bytes);
  std::vector<std::size_t> header_ends;  // [receive] of others: the requests up to and with its header
  for (std::size_t i = 0; i < rx.size(); ++i) {
    if (rx[i].peer != rank())
      transfer.receive(group_->comm, rx[i].peer, header_tag, i * sizeof(Header), sizeof(Header));
    header_ends.push_back(transfer.requests());
  }
  std::size_t at = tx.size() * sizeof(Header);
  for (std::size_t i = 0; i < tx.size(); ++i) {
    if (tx[i].peer == rank()) continue;
    const Header header{tx[i].elems, dtype};
    copy(transfer.sent(i * sizeof(Header)), &header, sizeof header);
    copy(transfer.sent(at), tx[i].data, tx[i].elems * width);
    transfer.send(group_->comm, tx[i].peer, header_tag, i * sizeof(Header), sizeof(Header), true);
    transfer.send(group_->comm, tx[i].peer, message_tag, at, tx[i].elems * width);
    at += tx[i].elems * width;
  }
  // A message is taken when its header is seen to be what its receive expects, in the order of receives.
  std::size_t seen = 0, landing = rx.size() * sizeof(Header);
  const auto take_next = [&] {
    for (; seen < rx.size() && transfer.is_done(0, header_ends[seen]); ++seen) {
      const Recv& recv = rx[seen];
      if (recv.peer == rank()) continue;
      Header header;
      copy(&header, transfer.received(seen * sizeof(Header)), sizeof header);
      if (header.elems != recv.elems || header.dtype != dtype) {
        fail<comm_error>("pleat[C06]: a message of ", header.elems, " ", header.dtype, " from rank ",
                         group_->members[static_cast<std::size_t>(recv.peer)], " meets a receive of ", recv.elems, " ",
                         dtype, " on rank ", world_rank, "; both sides must agree");
      }
      transfer.receive(group_->comm, recv.peer, message_tag, landing, recv.elems * width);
      landing += recv.elems * width;
    }
    return seen == rx.size() && transfer.is_done();
  };
  finish(take_next);
  landing = rx.size() * sizeof(Header);
  for (const Recv& recv : rx) {
    if (recv.peer == rank()) continue;
    copy(recv.data, transfer.received(landing), recv.elems * width);
    landing += recv.elems * width;
  }
  detail::for_own_messages(
      rank(), tx, rx, [&](const Send* send, const Recv* recv) { copy(recv->data, send->data, send->elems * width); });
}

static_assert(communicator<MpiComm>);

}  // namespace pleat::inline v0
