// What stands behind an NcclComm: the rank's job with all communicators it owns, and one group of it.
#pragma once

#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include <pleat/comm/communicator.hpp>
#include <pleat/comm/job.hpp>
#include <pleat/cuda/buffer.hpp>
#include <pleat/cuda/stream.hpp>
#include <pleat/nccl/check.hpp>

namespace pleat::inline v0::detail {

/// One rank: its job, and all that must end when the job does: communicators that pleat made, and waits of streams.
///
/// The communicators of a rank go together, when nothing of the rank is left, and not with their groups. NCCL frees a
/// communicator for all of a machine's ranks at once: in processes the first that destroys it waits for the others; of
/// threads the last one frees everybody's part, which waits for kernels on everybody's GPU. Either hangs when a rank
/// does it while a kernel of another rank waits for this one.
class NcclRank {
 public:
  NcclRank(std::unique_ptr<JobLink> link, int rank, int size, Job::Duration deadline)
      : job_(link != nullptr ? Job(std::move(link), deadline) : Job(rank, size, deadline)) {
    job_.on_end([this] { end_all(); });
  }
  NcclRank(const NcclRank&) = delete;
  NcclRank& operator=(const NcclRank&) = delete;
  ~NcclRank() {
    job_.leave();            // first, for NCCL may wait for the peers from here on
    (void)ncclGroupStart();  // as one, for ranks may have made them in different orders
    for (const ncclComm_t comm : communicators_) destroy(comm);
    (void)ncclGroupEnd();
  }

  Job& job() { return job_; }

  /// A place for a communicator of this rank, which stays where it is. Null until NCCL writes to it, and again when the
  /// job has ended.
  ncclComm_t* add_communicator() { return &communicators_.emplace_back(nullptr); }

  /// `release` ends the waits of this rank's streams for signals of peers; it runs, repeatedly, when the job ends.
  /// The result identifies it.
  int add_release(std::function<void()> release) {
    releases_.emplace_back(++last_release_, std::move(release));
    return last_release_;
  }
  void remove_release(int which) noexcept {
    std::erase_if(releases_, [which](const auto& entry) { return entry.first == which; });
  }

  /// Blocks until the work on `s` is done. Errors: as NcclComm::wait.
  void wait(cudaStream_t s, std::span<const int> members, ncclComm_t comm) {
    waits_for_ = s;
    job_.wait_until(
        [&] {
          check_communicators();
          check_communicator(comm);
          return is_done(s);
        },
        members, [] { return std::vector<int>(); });
    waits_for_.reset();
  }

  /// Errors: as `lose`, for a communicator of this rank that has one.
  void check_communicators() {
    for (const ncclComm_t comm : communicators_) check_communicator(comm);
  }
  void check_communicator(ncclComm_t comm) {
    ncclResult_t status = ncclSuccess;
    if (comm == nullptr) return;
    if (ncclCommGetAsyncError(comm, &status) != ncclSuccess) return;
    if (status != ncclSuccess && status != ncclInProgress) lose(status, "an operation under way");
  }

  /// After an NCCL call on `comm`: waits while it goes on in the background.
  /// Errors: comm_error C02 and C04; nccl_error C21, which ends the job.
  void settle(ncclResult_t status, const char* call, ncclComm_t comm, std::span<const int> members) {
    if (status == ncclInProgress) {
      job_.wait_until(
          [&] {
            if (ncclCommGetAsyncError(comm, &status) != ncclSuccess) status = ncclInternalError;
            return status != ncclInProgress;
          },
          members, [] { return std::vector<int>(); });
    }
    if (status != ncclSuccess) lose(status, call);
  }

  /// An NCCL error is often how a peer's death shows first: then that is what is reported.
  [[noreturn]] void lose(ncclResult_t status, const char* call) {
    const auto until = Job::Clock::now() + std::chrono::seconds(1);
    while (job_.has_link() && status != ncclInvalidArgument && status != ncclInvalidUsage &&
           Job::Clock::now() < until) {
      job_.check();
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    const Message text = nccl_failure(status, call);
    job_.fail(text.c_str());
    throw nccl_error(text);
  }

 private:
  static void destroy(ncclComm_t comm) noexcept {
    ncclResult_t status = ncclSuccess;
    if (comm == nullptr) return;
    // ncclCommDestroy refuses a communicator that has seen an error.
    const bool is_good = ncclCommGetAsyncError(comm, &status) == ncclSuccess && status == ncclSuccess;
    (void)(is_good ? ncclCommDestroy(comm) : ncclCommAbort(comm));
  }

  bool is_done(cudaStream_t s) {
    const cudaError_t status = cudaStreamQuery(s);
    if (status == cudaErrorNotReady) {
      (void)cudaGetLastError();
      return false;
    }
    try {
      check_cuda(status, "work on a stream");
    } catch (const cuda_error& e) {
      job_.fail(e.what());
      throw;
    }
    return true;
  }

  /// In one NCCL group, all communicators are told to stop before any is waited for, since a kernel of one may stand
  /// behind a kernel of another, or behind a wait for a signal. Peers that still run may write over a release, so it is
  /// repeated until the stream that was waited for is idle.
  void end_all() noexcept {
    (void)ncclGroupStart();
    for (ncclComm_t& comm : communicators_) {
      if (comm != nullptr) (void)ncclCommAbort(std::exchange(comm, nullptr));
    }
    constexpr int least_rounds = 5, most_rounds = 400;
    for (int round = 0; round < most_rounds && !releases_.empty(); ++round) {
      for (const auto& [which, release] : releases_) release();
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      if (round >= least_rounds && !(waits_for_ && cudaStreamQuery(*waits_for_) == cudaErrorNotReady)) break;
    }
    (void)cudaGetLastError();
    (void)ncclGroupEnd();
    waits_for_.reset();
  }

  Job job_;
  std::deque<ncclComm_t> communicators_;
  std::vector<std::pair<int, std::function<void()>>> releases_;
  int last_release_ = 0;
  std::optional<cudaStream_t> waits_for_;
};

/// Keeps what something that cannot be ended may still use.
template <class T>
void leak(T&& value) {
  (void)new std::remove_cvref_t<T>(std::forward<T>(value));
}

enum class Collective : unsigned char { all_gather, broadcast, reduce_scatter, all_reduce };
inline constexpr int collectives = 4;

/// One group of ranks, on one of them.
struct NcclGroup {
  NcclGroup(std::shared_ptr<NcclRank> the_rank, std::vector<int> job_ranks, int place, int on_device,
            std::uint64_t name)
      : owner(std::move(the_rank)), members(std::move(job_ranks)), rank(place), device(on_device), id(name) {
    has_sent_to.resize(members.size());
    has_received_from.resize(members.size());
  }
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;
  /// An exception that carries the world away ends the job; with a part of it, whoever catches the exception may go on.
  ~NcclGroup() {
    if (is_world && std::uncaught_exceptions() > exceptions) job().fail("an exception left its communicator");
    try {
      job().check();  // when somebody has failed, this ends the work on `barrier_word`
    } catch (...) {   // there is nobody left to tell
    }
    if (borrowed != nullptr && job().has_failed()) leak(std::move(barrier_word));
  }

  int size() const { return static_cast<int>(members.size()); }
  /// Null for a group of one that pleat made, and when the job has ended.
  ncclComm_t comm() const { return own != nullptr ? *own : borrowed; }
  Job& job() const { return owner->job(); }
  /// A tag of messages of this group alone; `what` tells them apart.
  std::uint64_t tag(std::uint64_t what) const { return mix(id, what) | std::uint64_t{1} << 63; }
  /// source: Steele, Lea and Flood's finalizer of SplitMix, doi 10.1145/2660193.2660195.
  static std::uint64_t mix(std::uint64_t a, std::uint64_t b) {
    std::uint64_t z = a * 0x9e3779b97f4a7c15U + b + 0x632be59bd9b4e019U;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
    return z ^ (z >> 31);
  }

  std::shared_ptr<NcclRank> owner;
  std::vector<int> members;  // ranks of the job
  int rank;
  int device;
  std::uint64_t id;
  ncclComm_t* own = nullptr;      // the owner's place of it, when pleat made it
  ncclComm_t borrowed = nullptr;  // or else that of somebody else
  bool is_world = false;          // of a job that pleat made the communicators of
  CudaBuffer barrier_word;
  std::uint64_t splits = 0;
  std::uint64_t met_sizes[collectives] = {};         // [Collective] one bit per magnitude of bytes, see NcclComm
  std::vector<char> has_sent_to, has_received_from;  // [peer]
  std::vector<Send> tx;                              // of a call; kept, so that calls allocate nothing
  std::vector<Recv> rx;
  int exceptions = std::uncaught_exceptions();
};

}  // namespace pleat::inline v0::detail
