// at::Tensor is a pleat tensor; and what every operation here has: a communicator of torch's and memory of torch's.
#pragma once

#include <memory>

#include <ATen/ATen.h>
#include <ATen/cuda/CUDAContext.h>

#include <pleat/nccl.cuh>

template <>
struct pleat::tensor_traits<at::Tensor> {
  static void* data(const at::Tensor& t) { return t.data_ptr(); }
  static int rank(const at::Tensor& t) { return static_cast<int>(t.dim()); }
  static std::int64_t extent(const at::Tensor& t, int axis) { return t.size(axis); }
  static std::int64_t stride(const at::Tensor& t, int axis) { return t.stride(axis); }
  static DType dtype(const at::Tensor& t) { return of(t.scalar_type()); }
  static Device device(const at::Tensor& t) {
    return {t.is_cuda() ? DeviceKind::cuda : DeviceKind::host, t.is_cuda() ? t.get_device() : 0};
  }
  static DType of(at::ScalarType type) {
    switch (type) {
      case at::kDouble:
        return DType::f64;
      case at::kFloat:
        return DType::f32;
      case at::kBFloat16:
        return DType::bf16;
      case at::kHalf:
        return DType::f16;
      case at::kLong:
        return DType::i64;
      case at::kInt:
        return DType::i32;
      case at::kByte:
        return DType::u8;
      default:
        pleat::fail<pleat::shape_error>("a torch tensor of ", c10::toString(type), " has no pleat dtype");
    }
  }
};

namespace embed {

/// Memory that torch's allocator owns; on the host it is pinned.
struct Memory {
  Memory(const pleat::Footprint& need, int device) {
    const auto bytes = at::TensorOptions().dtype(at::kByte);
    const auto cuda = bytes.device(at::kCUDA, static_cast<c10::DeviceIndex>(device));
    scratch = at::empty(static_cast<std::int64_t>(need.scratch), cuda);
    persistent = at::empty(static_cast<std::int64_t>(need.persistent), cuda);
    pinned = at::empty(static_cast<std::int64_t>(need.pinned_host), bytes.pinned_memory(true));
  }
  static pleat::Block block(const at::Tensor& t) {
    return {static_cast<std::byte*>(t.data_ptr()), static_cast<std::size_t>(t.numel())};
  }
  pleat::Memory<pleat::NcclArena> blocks(pleat::NcclArena* arena) const {
    return {block(scratch), block(persistent), block(pinned), arena};
  }

  at::Tensor scratch, persistent, pinned;
};

/// The communicator of a torch process group, borrowed.
struct Group {
  explicit Group(std::int64_t nccl_comm)
      : comm(pleat::NcclComm::borrow(reinterpret_cast<ncclComm_t>(nccl_comm))), ranks(comm) {}
  Group(const Group&) = delete;  // `ranks` names `comm`
  Group& operator=(const Group&) = delete;

  /// Torch's current stream, and one of our own for transfers.
  pleat::Streams<cudaStream_t> streams() const { return {at::cuda::getCurrentCUDAStream().stream(), transfers}; }

  pleat::NcclComm comm;
  pleat::GroupComm<pleat::NcclComm> ranks;
  pleat::CudaStream transfers;
};

/// A plan, and the arena that it needs: by peer access, or by collectives and without an arena where the GPUs do not
/// map each other's memory.
template <class Plan>
struct Transported {
  /// `make(transport)`: the plan.
  template <class Make>
  Transported(const Group& group, Make make)
      : plan(make(pleat::Transport::peer)),
        arena(std::make_unique<pleat::NcclArena>(group.ranks, plan.footprint().symmetric)) {
    if (arena->reachable(group.ranks.ranks())) return;
    arena = nullptr;
    plan = make(pleat::Transport::collective);
  }

  Plan plan;
  std::unique_ptr<pleat::NcclArena> arena;
};

}  // namespace embed
