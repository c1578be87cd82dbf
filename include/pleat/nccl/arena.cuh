// NcclArena: the symmetric arena of ranks with a GPU each, on an NCCL window, which maps memory across processes.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"  // in NCCL's headers, which nvcc does not take for system headers
#include <nccl_device.h>
#pragma GCC diagnostic pop

#include <pleat/comm/group_comm.hpp>
#include <pleat/comm/window_log.hpp>
#include <pleat/core/carve.hpp>
#include <pleat/cuda/kernel.hpp>
#include <pleat/cuda/mapped_peers.hpp>
#include <pleat/nccl/comm.hpp>

namespace pleat::inline v0 {

namespace detail {
/// out[i] = where this process sees the block of rank i of its load/store domain. One block of at least `count`
/// threads.
template <class Window>
PLEAT_KERNEL void window_bases(Window window, int count, std::byte** out) {
  const int i = static_cast<int>(threadIdx.x);
  if (i < count) out[i] = static_cast<std::byte*>(ncclGetLsaPointer(window, 0, i));
}

/// One rank's block and where it sees the others'.
struct NcclBlock {
  explicit NcclBlock(const NcclComm& stage_comm) : stage(stage_comm) {}
  NcclBlock(const NcclBlock&) = delete;
  NcclBlock& operator=(const NcclBlock&) = delete;
  /// Waits for the peers, which may still write here. After a failure the block is leaked and its release stays: a
  /// stream may still wait for a signal, and when it is released it may still write to peers.
  ~NcclBlock() {
    if (!is_registered || std::uncaught_exceptions() > exceptions || stage.job().has_failed()) return;
    try {
      (void)stage.all_gather_host("closing an arena", 0);
    } catch (...) {
      return;
    }
    stage.remove_release(release);
    (void)ncclCommWindowDeregister(stage.native(), window);
    (void)ncclDevCommDestroy(stage.native(), &domain);
    (void)ncclMemFree(data);
  }

  NcclComm stage;
  ncclDevComm domain{};
  ncclWindow_t window = nullptr;
  void* data = nullptr;
  bool is_registered = false;
  std::vector<std::byte*> bases;  // [rank of the stage] null where not mapped
  std::shared_ptr<SignalBoard> board;
  int release = 0;
  int exceptions = std::uncaught_exceptions();
};
}  // namespace detail

/// One block of device memory per rank of `stage`, all of the largest size any rank asks for. Made and destroyed by all
/// its ranks, while none of its memory is in use; must outlive the operations bound to it. What a rank's failure leaves
/// in use is leaked.
class NcclArena {
 public:
  // A copy would hand out the same bytes twice.
  NcclArena(NcclArena&&) noexcept = default;
  NcclArena& operator=(NcclArena&&) noexcept = default;

  /// Collective over `stage`, whose world ranks name its ranks in `open`; waits for the GPU. Size the arena by the sum
  /// of `footprint().symmetric` of all operations bound to it, and `channels` by that of `footprint().channels`: each
  /// takes 8 bytes per rank, and a graph takes none of its own. Errors, on all ranks alike: comm_error C26 when a rank
  /// has no memory for it; C20, C21, and what `NcclComm::wait` throws; C08 for channels below 0.
  NcclArena(const GroupComm<NcclComm>& stage, std::size_t bytes, int channels = default_channels)
      : ranks_(stage.ranks()), rank_(stage.rank()), size_{bytes, channels} {
    detail::check_channels(channels);
    if (stage.comm() == nullptr) {
      make_alone();
      log_ = detail::WindowLog(size_);
      return;
    }
    block_ = std::make_unique<detail::NcclBlock>(*stage.comm());
    const CudaDeviceScope device(block_->stage.device());
    make_domain();
    for (const detail::ArenaSize& wanted : block_->stage.all_gather_host("arena", size_)) size_.take(wanted);
    log_ = detail::WindowLog(size_);
    if (domain_size_ > 1 && block_bytes() > 0) make_window();  // operations by collectives alone map nothing
  }

  /// Whether the group (world ranks) lies in this arena, in one domain of GPUs that see each other's memory.
  bool reachable(const Group& group) const {
    detail::check_not_moved_from(!bases_.empty());
    return std::all_of(group.begin(), group.end(), [&](int rank) {
      const int place = ranks_.index_of(rank);
      return place >= 0 && bases_[static_cast<std::size_t>(place)] != nullptr;
    });
  }

  /// The window of my group `group` (world ranks): the next `bytes` of the arena and `channels` channels.
  /// Errors: comm_error C07 when the group is not reachable, C08 when the arena is used up, C34.
  [[nodiscard]] MappedPeers open(const Group& group, std::size_t bytes, int channels) {
    if (!reachable(group) || !group.contains(ranks_[rank_])) {
      fail<comm_error>("pleat[C07]: group ", group, " of rank ", ranks_[rank_], " is not inside the arena of ranks ",
                       ranks_, ", or not on GPUs that map each other's memory");
    }
    const auto place = log_.add(bytes, channels);
    MappedWindow window{.members = {}, .bases = {}, .flags = {}, .channels = channels};
    for (const int rank : group) {
      std::byte* base = bases_[static_cast<std::size_t>(ranks_.index_of(rank))];
      window.members.push_back(ranks_.index_of(rank));
      window.bases.push_back(base + place.offset_bytes);
      window.flags.push_back(reinterpret_cast<std::uint64_t*>(base + flags_offset()));
    }
    return MappedPeers(board_, std::move(window));
  }

  /// Collective over `stage`, the ranks of this arena; after the last bind: whether all ranks have opened the same
  /// windows. Waits for the GPU. Errors, on all ranks alike: comm_error C32; those of `NcclComm::wait`.
  void seal(const GroupComm<NcclComm>& stage) const {
    log_.check(ranks_, [&](const auto& mine) {
      using Value = std::remove_cvref_t<decltype(mine)>;
      return stage.comm() == nullptr ? std::vector<Value>{mine} : stage.comm()->all_gather_host("seal", mine);
    });
  }

 private:
  std::size_t flags_offset() const {
    Carver memory;
    memory.take_bytes(size_.bytes);
    return memory.used_bytes();
  }
  std::size_t block_bytes() const { return flags_offset() + flags_bytes(); }
  std::size_t flags_bytes() const { return FlagLayout{ranks_.size()}.bytes(size_.channels); }

  /// Zeroes the own block and makes the board of its flags.
  void make_board(std::byte* own) {
    const CudaStream stream;
    CudaExecutor{}.zero(own, block_bytes(), stream);
    stream.synchronize();
    std::vector<int> names(ranks_.begin(), ranks_.end());
    board_ = std::make_shared<SignalBoard>(CudaDriver(), std::move(names), rank_,
                                           Block{own + flags_offset(), flags_bytes()});
  }

  void make_alone() {
    memory_ = CudaBuffer(block_bytes());
    bases_ = {memory_.data()};
    make_board(memory_.data());
  }

  /// The domain comes before the window: without support for symmetric memory it fails in a clean way, whereas the call
  /// that makes a window returns a handle that is none.
  void make_domain() {
    NcclComm& stage = block_->stage;
    bases_.assign(static_cast<std::size_t>(stage.size()), nullptr);
    ncclDevCommRequirements wanted{};
    (void)stage.all_gather_host("arena", 0);  // all are here, since NCCL now waits for them without a deadline
    const ncclResult_t status = ncclDevCommCreate(stage.native(), &wanted, &block_->domain);
    if (status == ncclInvalidUsage) return;
    stage.settle(status, "ncclDevCommCreate");
    domain_size_ = block_->domain.lsaSize;
  }

  void make_window() {
    NcclComm& stage = block_->stage;
    const ncclResult_t allocated = ncclMemAlloc(&block_->data, block_bytes());
    const auto statuses = stage.all_gather_host("arena", static_cast<int>(allocated));
    for (int r = 0; r < stage.size(); ++r) {
      const auto status = static_cast<ncclResult_t>(statuses[static_cast<std::size_t>(r)]);
      if (status == ncclSuccess) continue;
      if (allocated == ncclSuccess) (void)ncclMemFree(block_->data);
      (void)cudaGetLastError();  // it is reported here
      fail<comm_error>("pleat[C26]: rank ", ranks_[r], " cannot allocate the ", block_bytes(),
                       " bytes of its part of the arena: ", ncclGetErrorString(status));
    }
    stage.settle(
        ncclCommWindowRegister(stage.native(), block_->data, block_bytes(), &block_->window, NCCL_WIN_COLL_SYMMETRIC),
        "ncclCommWindowRegister");
    if (block_->window == nullptr) {
      fail<comm_error>("pleat[C26]: NCCL gives no window on ", block_bytes(),
                       " bytes; NCCL_WIN_ENABLE and NCCL_CUMEM_ENABLE must not be 0");
    }
    block_->is_registered = true;
    fill_bases();
    make_board(bases_[static_cast<std::size_t>(rank_)]);
    block_->release = stage.add_release([board = board_] { board->release(); });
    (void)stage.all_gather_host("arena", 0);  // nobody signals before all flags are zero
  }

  void fill_bases() {
    const CudaStream stream;
    const CudaBuffer table(sizeof(std::byte*) * static_cast<std::size_t>(domain_size_));
    auto* const on_device = reinterpret_cast<std::byte**>(table.data());
    detail::window_bases<<<1, domain_size_, 0, stream>>>(block_->window, domain_size_, on_device);
    check_launch("window_bases");
    const int first = rank_ - block_->domain.lsaRank;  // a domain's ranks follow each other
    CudaExecutor{}.copy(bases_.data() + first, table.data(), table.size_bytes(), stream);
    stream.synchronize();
  }

  Group ranks_;
  int rank_;
  std::unique_ptr<detail::NcclBlock> block_;  // null when this rank is alone
  CudaBuffer memory_;                         // of a rank that is alone
  std::shared_ptr<SignalBoard> board_;
  std::vector<std::byte*> bases_;  // [rank of the stage] null where not mapped
  int domain_size_ = 1;
  detail::ArenaSize size_;
  detail::WindowLog log_;
};
static_assert(symmetric_arena<NcclArena>);

}  // namespace pleat::inline v0
