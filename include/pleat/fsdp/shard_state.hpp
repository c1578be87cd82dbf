// What a bound plan holds on one rank: its shards, their pieces, and the transports of its units.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include <pleat/core/streams.hpp>
#include <pleat/fsdp/plan.hpp>
#include <pleat/fsdp/shard_memory.hpp>
#include <pleat/fsdp/transport.hpp>
#include <pleat/fsdp/view.hpp>

namespace pleat::inline v0::fsdp {

/// The caller's streams: computation, gathers, sums. They may be one and the same. A GPU should have `reduce` at a high
/// priority: its few CTAs start as soon as computation leaves room.
template <class Stream>
struct ShardStreams {
  Stream compute;
  Stream gather;
  Stream reduce;
  /// Copies of shards into this rank's own slots; one of its own lets them run beside the pushes to peers.
  Stream own = gather;
};

/// Shared by the halves of a Sharder; `transports` by kind, null for a kind without units.
template <executor Executor>
struct ShardState {
  ShardState(const Plan& planned, Executor device_executor) : plan(planned), executor(device_executor) {}

  Plan plan;
  Executor executor;
  std::array<std::unique_ptr<UnitTransport<Executor>>, 2> transports;
  std::vector<ShardMemory> shards;         // [unit]
  std::vector<std::vector<Piece>> pieces;  // [unit]
  /// [unit]: the trainable pieces, which shards have on the device; copied from here in the order of a stream.
  std::vector<std::vector<UpdatePiece>> update_pieces;
  std::byte* workspace = nullptr;

  /// Of a unit: its layout, its kind, how units of its kind travel, this rank's shard, what of it that is, its
  /// parameters in a buffer, its name. A number that there is not is for `check_unit` to find.
  const UnitLayout& layout(int unit) const { return plan.layouts[static_cast<std::size_t>(unit)]; }
  Param kind(int unit) const { return plan.kinds[static_cast<std::size_t>(unit)]; }
  UnitTransport<Executor>& transport(Param kind) const { return *transports[static_cast<std::size_t>(kind)]; }
  const ShardMemory& shard(int unit) const { return shards[static_cast<std::size_t>(unit)]; }
  const std::vector<Piece>& held(int unit) const { return pieces[static_cast<std::size_t>(unit)]; }
  UnitView view(int unit, std::byte* base, DType dtype) const {
    return {layout(unit), base, dtype, device(), name(unit)};
  }
  const char* name(int unit) const { return plan.names[static_cast<std::size_t>(unit)].c_str(); }

  Device device() const { return executor.device(); }

  /// Errors: shape_error F17, always.
  [[noreturn]] static void fail_fork() {
    fail<shape_error>(
        "pleat[F17]: fork while a gather or a sum is under way, or gradients are written; reduce them and "
        "call join first");
  }
  /// Errors: shape_error F13.
  void check_unit(int unit) const {
    const auto count = static_cast<int>(plan.layouts.size());
    if (unit < 0 || unit >= count)
      fail<shape_error>("pleat[F13]: there is no unit ", unit, "; units are ", Indices{count});
  }
  void check_param(int unit, int param) const {
    check_unit(unit);
    detail::check_param(name(unit), layout(unit), param);
  }
};

}  // namespace pleat::inline v0::fsdp
