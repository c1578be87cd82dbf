// NcclComm: the communicator of ranks that have a GPU each, processes or threads, on one machine or many.
#pragma once

#include <array>
#include <bit>
#include <cstring>

#include <pleat/comm/call_checks.hpp>
#include <pleat/comm/communicator.hpp>
#include <pleat/comm/own_messages.hpp>
#include <pleat/cuda/executor.hpp>
#include <pleat/nccl/gather_v.hpp>
#include <pleat/nccl/group.hpp>
#include <pleat/nccl/rendezvous.hpp>

namespace pleat::inline v0 {

/// Options of a world of NCCL.
struct NcclOptions {
  /// How long `wait` waits for work that needs peers, and the first meeting of ranks for each other (C04, C25).
  std::chrono::milliseconds deadline = std::chrono::seconds(120);
};

/// A communicator over NCCL. Operations are ordered on the caller's stream. The first operation of a kind and
/// magnitude, or with a peer, also meets the peers on the host, because NCCL then connects to them and cannot be
/// interrupted; later ones do not block.
///
/// A peer's failure shows in `wait` and `check` (C02 a rank failed or died, C03 it returned early, C04 the deadline,
/// C21 an NCCL error): the rank's streams that wait for signals are released, all communicators that pleat made for it
/// are aborted, and from then on every operation throws. A borrowed communicator is reported, never aborted. Who blocks
/// in cudaStreamSynchronize instead gets no deadline. Copies are handles on the same communicator; one thread uses
/// them.
///
/// Wait for a communicator's work before it goes. Groups may go at any time, in any order; NCCL's memory for them goes
/// with the last handle of the rank, on the world or on any part of it. There a rank waits for those of its machine, or
/// for their failure.
class NcclComm {
 public:
  using device_type = cuda_device;
  using stream_type = cudaStream_t;
  /// Calls only enqueue, and may be captured in a graph.
  static constexpr bool is_capturable = true;

  /// A world over the ranks of `link`, which all call; makes `device` current. Null: a world of one rank.
  /// Errors, on all ranks alike: C22, C23; comm_error C24 when two ranks share a GPU; cuda_error C20; C02 and C04.
  static NcclComm create(std::unique_ptr<JobLink> link, int device, NcclOptions options = {});

  /// The world of the launcher's job, see LauncherEnvironment; uses device `local_rank`, or the only one that is
  /// visible. All processes call it, each once. Errors: comm_error C25; as `create`.
  static NcclComm from_environment(NcclOptions options = {}) {
    const LauncherEnvironment environment = LauncherEnvironment::from_process();
    std::unique_ptr<JobLink> link;
    if (environment.size > 1) link = rendezvous(environment, options.deadline);
    return create(std::move(link), environment.local_rank % std::max(1, cuda_device_count()), options);
  }

  /// A communicator on one that belongs to somebody else and must outlive it. With a `link`, whose ranks are those of
  /// `comm`, a failure names the rank. When ranks are threads and have split it, they must meet on the host after the
  /// last handle has gone, before new work. Errors: C21, C22, C23.
  static NcclComm borrow(ncclComm_t comm, NcclOptions options = {}, std::unique_ptr<JobLink> link = nullptr);

  // No moves: what is moved from stays a handle.
  NcclComm(const NcclComm&) = default;
  NcclComm& operator=(const NcclComm&) = default;

  int rank() const noexcept { return group_->rank; }
  int size() const noexcept { return group_->size(); }
  /// NCCL's handle; null for a group of one that pleat made, and after a failure.
  ncclComm_t native() const noexcept { return group_->comm(); }
  /// The device of this rank.
  int device() const noexcept { return group_->device; }
  /// The ranks of this group, as ranks of the job; and what this rank knows of the job.
  const std::vector<int>& world_ranks() const noexcept { return group_->members; }
  Job& job() const noexcept { return group_->job(); }

  [[nodiscard]] NcclComm split(int color, int key);

  void all_gather(const void* in, void* out, std::size_t elems, DType dtype, cudaStream_t s) {
    enter("all_gather");
    gather(in, out, elems, dtype, s);
  }

  /// How the parts move is chosen by gather_v.hpp; `way` overrides it, alike on all ranks.
  void all_gather_v(const void* in, void* out, Counts counts, DType dtype, cudaStream_t s,
                    std::optional<GatherV> way = {}) {
    enter("all_gather_v");
    require_counts(counts);
    detail::check_counts("all_gather_v", counts, dtype);
    const std::size_t width = size_bytes(dtype);
    if (!way) way = gather_v_way(counts, width);
    if (*way == GatherV::equal) return gather(in, out, counts[0], dtype, s);
    if (*way == GatherV::broadcasts) return gather_by_broadcasts(in, out, counts, dtype, s);
    const std::size_t mine = counts[static_cast<std::size_t>(rank())];
    begin_batch();
    std::size_t offset = 0;
    for (int r = 0; r < size(); ++r) {
      const std::size_t elems = counts[static_cast<std::size_t>(r)];
      group_->tx.push_back({in, mine, r});
      group_->rx.push_back({at(out, offset), elems, r});
      offset += elems * width;
    }
    move(group_->tx, group_->rx, dtype, s);
  }

  void all_to_all(const void* in, void* out, std::size_t elems, DType dtype, cudaStream_t s) {
    enter("all_to_all");
    (void)bytes_of(elems, dtype);
    const auto elems_of = [elems](std::size_t) { return elems; };
    move_blocks(in, elems_of, out, elems_of, dtype, s);
  }

  void all_to_all_v(const void* in, Counts send, void* out, Counts recv, DType dtype, cudaStream_t s) {
    enter("all_to_all_v");
    for (const Counts counts : {send, recv}) {
      require_counts(counts);
      detail::check_counts("all_to_all_v", counts, dtype);
    }
    move_blocks(
        in, [send](std::size_t r) { return send[r]; }, out, [recv](std::size_t r) { return recv[r]; }, dtype, s);
  }

  /// Errors: comm_error C05 when the root is no rank.
  void broadcast(void* buffer, std::size_t elems, int root, DType dtype, cudaStream_t s) {
    enter("broadcast");
    if (root < 0 || root >= size()) {
      fail<comm_error>("pleat[C05]: rank ", world_rank(), " calls broadcast; root ", root, " is not in 0 to ",
                       size() - 1);
    }
    const std::size_t bytes = bytes_of(elems, dtype);
    if (elems == 0 || size() == 1) return;
    meet(detail::Collective::broadcast, bytes);
    settle(ncclBroadcast(buffer, buffer, elems, nccl_dtype(dtype), root, group_->comm(), s), "ncclBroadcast");
  }

  /// Errors: comm_error C06 when a peer is no rank, or messages to oneself do not match.
  void exchange(std::span<const Send> tx, std::span<const Recv> rx, DType dtype, cudaStream_t s) {
    enter("exchange");
    for (const Send& send : tx) require_message(send.peer, send.elems, dtype);
    for (const Recv& recv : rx) require_message(recv.peer, recv.elems, dtype);
    move(tx, rx, dtype, s);
  }

  void barrier(cudaStream_t s) {
    enter("barrier");
    if (size() == 1) return;
    void* word = group_->barrier_word.data();
    meet(detail::Collective::all_reduce, sizeof(std::int32_t));
    settle(ncclAllReduce(word, word, 1, ncclInt32, ncclSum, group_->comm(), s), "ncclAllReduce");
  }

  /// NCCL's own sums, in an order of NCCL's. `in` [size * elems] and `out` [elems]; `out == in + rank * elems` is
  /// allowed.
  void reduce_scatter(const void* in, void* out, std::size_t elems, DType dtype, cudaStream_t s) {
    enter("reduce_scatter");
    const std::size_t bytes = bytes_of(elems, dtype);
    if (size() == 1) return copy(out, in, bytes, s);
    if (elems == 0) return;
    meet(detail::Collective::reduce_scatter, bytes);
    settle(ncclReduceScatter(in, out, elems, nccl_dtype(dtype), ncclSum, group_->comm(), s), "ncclReduceScatter");
  }
  void all_reduce(void* buffer, std::size_t elems, DType dtype, cudaStream_t s) {
    enter("all_reduce");
    const std::size_t bytes = bytes_of(elems, dtype);
    if (elems == 0 || size() == 1) return;
    meet(detail::Collective::all_reduce, bytes);
    settle(ncclAllReduce(buffer, buffer, elems, nccl_dtype(dtype), ncclSum, group_->comm(), s), "ncclAllReduce");
  }

  /// Blocks until the work on `s` is done. Errors: comm_error C02, C03, C04, naming rank and operation; nccl_error C21;
  /// cuda_error C20 when the work itself has failed, which ends the job.
  void wait(cudaStream_t s) { group_->owner->wait(s, group_->members, group_->comm()); }

  /// Looks for failures without waiting. Errors: comm_error C02; nccl_error C21.
  void check() {
    job().check();
    group_->owner->check_communicators();
    group_->owner->check_communicator(group_->comm());
  }

  /// Ends the job because of this rank, for a program that catches what its rank throws: `why` reaches all others.
  void abandon(const char* why) noexcept { job().fail(why); }

  /// `release` ends waits of this rank's streams for signals of peers. It runs, repeatedly, when the job ends, until it
  /// is removed by what this returns.
  int add_release(std::function<void()> release) { return group_->owner->add_release(std::move(release)); }
  void remove_release(int which) noexcept { group_->owner->remove_release(which); }

  /// After an NCCL call of the caller's on `native()`. Errors: C21, which ends the job; C02 and C04.
  void settle(ncclResult_t status, const char* call) {
    group_->owner->settle(status, call, group_->comm(), group_->members);
  }

  /// Collective, beyond the concept: every rank's small host value, in the order of ranks. For setup: it waits for the
  /// GPU. `operation` is a string literal, for the texts of errors. Errors: as `wait`.
  template <class T>
  std::vector<T> all_gather_host(const char* operation, const T& mine);

 private:
  using State = detail::NcclGroup;
  explicit NcclComm(std::shared_ptr<State> group) : group_(std::move(group)) {}

  void enter(const char* operation) { job().enter(operation); }
  int world_rank() const { return group_->members[static_cast<std::size_t>(rank())]; }

  /// Before NCCL may connect: a collective connects anew when its algorithm does, which depends on the magnitude.
  void meet(detail::Collective collective, std::size_t bytes) {
    const auto magnitude = static_cast<std::uint64_t>(std::bit_width(bytes)) - 1;
    auto& met = group_->met_sizes[static_cast<int>(collective)];
    if (met >> magnitude & 1) return;
    job().meet(group_->members, group_->tag(static_cast<std::uint64_t>(collective) * 64 + magnitude));
    met |= std::uint64_t{1} << magnitude;
  }
  /// The same between the two ends of each message that is the first of its direction.
  void meet(std::span<const Send> tx, std::span<const Recv> rx) {
    std::vector<Job::Exchange> exchanges;
    const auto meet_once = [&](std::vector<char>& has_met, int peer, int from, int to) {
      if (std::exchange(has_met[static_cast<std::size_t>(peer)], 1)) return;
      const auto way =
          static_cast<std::uint64_t>(from) * static_cast<std::uint64_t>(size()) + static_cast<std::uint64_t>(to);
      exchanges.push_back({group_->members[static_cast<std::size_t>(peer)], group_->tag(1024 + way)});
    };
    for (const Send& send : tx) {
      if (is_for_nccl(send)) meet_once(group_->has_sent_to, send.peer, rank(), send.peer);
    }
    for (const Recv& recv : rx) {
      if (is_for_nccl(recv)) meet_once(group_->has_received_from, recv.peer, recv.peer, rank());
    }
    if (!exchanges.empty()) job().exchange(exchanges, {});
  }

  void gather(const void* in, void* out, std::size_t elems, DType dtype, cudaStream_t s) {
    const std::size_t bytes = bytes_of(elems, dtype);
    if (size() == 1) return copy(out, in, bytes, s);
    if (elems == 0) return;
    meet(detail::Collective::all_gather, bytes);
    settle(ncclAllGather(in, out, elems, nccl_dtype(dtype), group_->comm(), s), "ncclAllGather");
  }
  void gather_by_broadcasts(const void* in, void* out, Counts counts, DType dtype, cudaStream_t s) {
    for (const std::size_t elems : counts) {
      if (elems != 0) meet(detail::Collective::broadcast, elems * size_bytes(dtype));
    }
    ncclResult_t status = ncclGroupStart();
    std::size_t offset = 0;
    for (int r = 0; r < size() && status == ncclSuccess; ++r) {
      const std::size_t elems = counts[static_cast<std::size_t>(r)];
      if (elems == 0) continue;
      status = ncclBroadcast(in, at(out, offset), elems, nccl_dtype(dtype), r, group_->comm(), s);
      offset += elems * size_bytes(dtype);
    }
    end_group(status, "a group of ncclBroadcast");
  }

  /// Messages of this call alone, in memory that later calls use again.
  void begin_batch() {
    group_->tx.clear();
    group_->rx.clear();
  }
  /// Block p of `in`, of send(p) elements, goes to rank p; block p of `out` comes from it.
  template <class SendElems, class RecvElems>
  void move_blocks(const void* in, SendElems send, void* out, RecvElems recv, DType dtype, cudaStream_t s) {
    begin_batch();
    const std::size_t width = size_bytes(dtype);
    std::size_t in_offset = 0, out_offset = 0;
    for (int r = 0; r < size(); ++r) {
      const std::size_t sent = send(static_cast<std::size_t>(r)), received = recv(static_cast<std::size_t>(r));
      group_->tx.push_back({at(in, in_offset), sent, r});
      group_->rx.push_back({at(out, out_offset), received, r});
      in_offset += sent * width;
      out_offset += received * width;
    }
    move(group_->tx, group_->rx, dtype, s);
  }

  /// All messages as one NCCL group; those to oneself are copies, and empty ones are none.
  void move(std::span<const Send> tx, std::span<const Recv> rx, DType dtype, cudaStream_t s) {
    detail::check_own_messages(rank(), world_rank(), tx, rx);
    meet(tx, rx);
    bool has_own = false, has_others = false;
    for (const Send& send : tx) (send.peer == rank() ? has_own : has_others) |= send.elems != 0;
    for (const Recv& recv : rx) has_others |= is_for_nccl(recv);
    if (has_own) {
      detail::for_own_messages(rank(), tx, rx, [&](const Send* send, const Recv* recv) {
        copy(recv->data, send->data, send->elems * size_bytes(dtype), s);
      });
    }
    if (!has_others) return;
    ncclResult_t status = ncclGroupStart();
    for (const Send& send : tx) {
      if (status != ncclSuccess || !is_for_nccl(send)) continue;
      status = ncclSend(send.data, send.elems, nccl_dtype(dtype), send.peer, group_->comm(), s);
    }
    for (const Recv& recv : rx) {
      if (status != ncclSuccess || !is_for_nccl(recv)) continue;
      status = ncclRecv(recv.data, recv.elems, nccl_dtype(dtype), recv.peer, group_->comm(), s);
    }
    end_group(status, "a group of ncclSend and ncclRecv");
  }
  template <class SendOrRecv>
  bool is_for_nccl(const SendOrRecv& message) const {
    return message.peer != rank() && message.elems != 0;
  }
  /// Ends the NCCL group whatever became of its calls. In a group, calls on a non-blocking communicator return success.
  void end_group(ncclResult_t status, const char* call) {
    const ncclResult_t end = ncclGroupEnd();
    settle(status == ncclSuccess ? end : status, call);
  }

  void require_counts(Counts counts) const {
    if (counts.size() == group_->members.size()) return;
    fail<comm_error>("pleat[C05]: rank ", world_rank(), " calls ", job().last_operation(), "; it gives ", counts.size(),
                     " counts for ", size(), " ranks");
  }
  std::size_t bytes_of(std::size_t elems, DType dtype) const {
    return detail::bytes_of(job().last_operation(), elems, dtype, size());
  }
  void require_message(int peer, std::size_t elems, DType dtype) const {
    (void)detail::bytes_of("exchange", elems, dtype);
    if (peer >= 0 && peer < size()) return;
    fail<comm_error>("pleat[C06]: exchange with peer ", peer, "; valid peers: 0 to ", size() - 1);
  }

  static ncclDataType_t nccl_dtype(DType dtype) {
    switch (dtype) {
      case DType::f64:
        return ncclFloat64;
      case DType::f32:
        return ncclFloat32;
      case DType::bf16:
        return ncclBfloat16;
      case DType::f16:
        return ncclFloat16;
      case DType::i64:
        return ncclInt64;
      case DType::i32:
        return ncclInt32;
      case DType::u8:
        return ncclUint8;
    }
    return ncclNumTypes;
  }
  static void copy(void* out, const void* in, std::size_t bytes, cudaStream_t s) {
    if (out != in) CudaExecutor{}.copy(out, in, bytes, s);
  }
  static std::byte* at(void* base, std::size_t offset) { return static_cast<std::byte*>(base) + offset; }
  static const std::byte* at(const void* base, std::size_t offset) {
    return static_cast<const std::byte*>(base) + offset;
  }

  std::shared_ptr<State> group_;
};
static_assert(communicator<NcclComm> && native_reductions<NcclComm>);

}  // namespace pleat::inline v0

#include <pleat/nccl/comm_setup.hpp>  // create, borrow, split, all_gather_host
