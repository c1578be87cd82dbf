// All-gather and all-to-all on peer-mapped memory: a block is written where its receiver reads it.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <optional>

#include <pleat/comm/call_checks.hpp>
#include <pleat/comm/peer_slots.hpp>
#include <pleat/comm/transfer_table.hpp>
#include <pleat/core/carve.hpp>
#include <pleat/core/dtype.hpp>
#include <pleat/core/executor.hpp>
#include <pleat/core/footprint.hpp>
#include <pleat/core/streams.hpp>

namespace pleat::inline v0 {

/// For peers without kernels that store and signal: all blocks travel by copies.
struct NoStores {
  static constexpr bool exist = false;
};

/// Choices and sizes of PeerCollectives; a value that every rank computes alike.
struct PeerCollectivesPlan {
  int ranks = 1;
  std::size_t block_bytes = 0;  // the largest block
  std::size_t store_bytes = 0;  // the largest that travels by stores
  KernelSteps stores = {};      // those of the table that blocks need
  int store_channels = 0;
  std::size_t store_persistent_bytes = 0;
  std::size_t beside_bytes = 0;  // see TransferTable

  using Slots = std::array<std::byte*, peer_slots>;
  /// Where results [ranks, block] of copies and of stores lie in the window.
  struct Window {
    Slots copied = {}, stored = {};
  };
  constexpr Window carve(Carver& window) const {
    Window result;
    const auto take = [&](Slots& slots, std::size_t bytes) {
      for (std::byte*& slot : slots) slot = window.take_bytes(static_cast<std::size_t>(ranks) * bytes);
    };
    take(result.copied, block_bytes > store_bytes ? block_bytes : 0);
    take(result.stored, store_bytes);
    return result;
  }
  constexpr int channels() const { return detail::slot_channels + store_channels; }
  constexpr Footprint footprint() const {
    Carver window;
    carve(window);
    return {.symmetric = window.used_bytes(), .persistent = store_persistent_bytes, .channels = channels()};
  }
};
constexpr void append_to(Message& message, const PeerCollectivesPlan& p) {
  message.append("peer collectives ranks=").append(p.ranks).append(" block_bytes=").append(p.block_bytes);
  message.append(" stores=");
  append_to(message, p.stores);
  message.append(" beside_bytes=").append(p.beside_bytes);
}

/// The plan for blocks of at most `block_bytes`, what a rank sends to one peer. `Stores`: the peers' kernels,
/// MappedStores where each rank has a GPU of its own. Errors: comm_error C05 for more bytes than memory can have.
template <class Stores = NoStores>
constexpr PeerCollectivesPlan plan_peer_collectives(int ranks, std::size_t block_bytes,
                                                    const TransferTable& table = {}) {
  (void)detail::bytes_of("peer collectives", block_bytes, DType::u8, std::int64_t{2 * peer_slots} * ranks);
  PeerCollectivesPlan plan{.ranks = ranks, .block_bytes = block_bytes, .beside_bytes = table.beside_bytes};
  if constexpr (Stores::exist) {
    if (ranks > 1) plan.stores = steps_up_to(table.stores, block_bytes);
    plan.store_bytes = largest_block(plan.stores);
    if (const int ctas = most_ctas(plan.stores); ctas > 0) {
      plan.store_channels = Stores::channels(ctas);
      plan.store_persistent_bytes = Stores::persistent_bytes(ranks, ctas);
    }
  }
  return plan;
}

/// All-gather and all-to-all whose results stay in the window: what a peer sends is written where it is read. At most
/// two results are in use; `release` gives the oldest back. Inputs are ready on `s.compute`, and what follows there
/// sees the result and may overwrite the input; transfers run on `s.compute`, large own blocks beside them on `s.comm`.
/// Every rank makes the same calls, release too, in the same order. Moves (ranks - 1) * elems elements each way.
///
/// May be captured in a graph after a call of every kind of transfer in it; the graph has an even number of each, and
/// between its launches there is an even number of each; as many results are in use before it as after it.
template <executor Executor, peer_access Peers, class Stores = NoStores>
class PeerCollectives {
 public:
  using stream_type = typename Executor::stream_type;
  using StreamPair = Streams<stream_type>;

  /// See `bind`. `peers` is the window of the plan's footprint.
  PeerCollectives(const PeerCollectivesPlan& plan, Executor executor, Peers peers, Block persistent,
                  std::chrono::milliseconds deadline, stream_type s)
      : plan_(plan),
        executor_(executor),
        peers_(std::move(peers)),
        input_ready_(executor_.make_event()),
        own_ready_(executor_.make_event()) {
    Carver memory(Block{peers_.base(peers_.rank()), plan_.footprint().symmetric});
    const PeerCollectivesPlan::Window window = plan_.carve(memory);
    copied_.slots = window.copied;
    stored_.slots = window.stored;
    if constexpr (Stores::exist) {
      if (plan_.store_bytes > 0) {
        stores_.emplace(peers_, detail::slot_channels, most_ctas(plan_.stores), persistent, deadline, s);
        stores_to_release_ = peer_slots;
      }
    }
    for (int slot = 0; slot < peer_slots; ++slot) detail::signal_peers(peers_, detail::free_channel(slot), s);
  }

  const PeerCollectivesPlan& plan() const { return plan_; }

  /// Where this rank's block of the next all_gather of `elems` will lie. Who writes it there, on `s.compute` after the
  /// last release, and passes it as `in`, spares a copy. Errors: as all_gather.
  std::byte* own_block(std::size_t elems, DType dtype) {
    const std::size_t bytes = detail::bytes_of("own_block", elems, dtype);
    check("own_block", bytes);
    return kind_of(bytes).slot() + static_cast<std::size_t>(peers_.rank()) * bytes;
  }

  /// The result [ranks, elems]: `in` [elems] of every rank. Errors: shape_error C30 when the block is larger than
  /// planned, or two results are not released; T01, C05 as a communicator's.
  std::byte* all_gather(const void* in, std::size_t elems, DType dtype, const StreamPair& s) {
    return move("all_gather", in, 0, detail::bytes_of("all_gather", elems, dtype), s);
  }
  /// The result [ranks, elems]: block p of `in` [ranks, elems] goes to rank p. Errors: as all_gather.
  std::byte* all_to_all(const void* in, std::size_t elems, DType dtype, const StreamPair& s) {
    const std::size_t bytes = detail::bytes_of("all_to_all", elems, dtype);
    return move("all_to_all", in, bytes, bytes, s);
  }

  /// What reads the oldest result is on `s.compute` by now: its memory may be written again. Errors: shape_error C30
  /// when there is no result.
  void release(const StreamPair& s) {
    if (used_ == 0) fail<shape_error>("pleat[C30]: release without a result; each all_gather and all_to_all gives one");
    const Result oldest = results_[0];
    results_[0] = results_[1];
    --used_;
    if (oldest.is_stored) {
      ++stores_to_release_;  // the next kernel tells the peers
    } else {
      detail::signal_peers(peers_, detail::free_channel(oldest.slot), s.compute);
    }
  }

  /// Throws what kernels of stores have met; waits for `s`. Errors: comm_error C27.
  void check_stores(stream_type s) {
    if constexpr (Stores::exist) {
      if (stores_) stores_->check(s);
    }
  }

 private:
  /// The slots of one kind of transfer, in turn.
  struct Kind {
    PeerCollectivesPlan::Slots slots = {};
    int next = 0;
    std::byte* slot() const { return slots[static_cast<std::size_t>(next)]; }
  };
  struct Result {
    bool is_stored = false;
    int slot = 0;
  };

  bool is_stored(std::size_t bytes) const { return bytes <= plan_.store_bytes && plan_.store_bytes > 0; }
  Kind& kind_of(std::size_t bytes) { return is_stored(bytes) ? stored_ : copied_; }

  void check(const char* operation, std::size_t bytes) const {
    if (bytes > plan_.block_bytes || used_ == peer_slots) {
      fail<shape_error>("pleat[C30]: ", operation, " of blocks of ", bytes, " bytes with ", used_,
                        " results in use; at most ", plan_.block_bytes, " bytes are planned, and ", peer_slots - 1,
                        " results may be in use: release the oldest");
    }
  }

  /// Block p of `in`, p * stride_bytes behind its start, goes to rank p.
  std::byte* move(const char* operation, const void* in, std::size_t stride_bytes, std::size_t bytes,
                  const StreamPair& s) {
    check(operation, bytes);
    Kind& kind = kind_of(bytes);
    const int slot = std::exchange(kind.next, (kind.next + 1) % peer_slots);
    std::byte* const out = kind.slots[static_cast<std::size_t>(slot)];
    results_[static_cast<std::size_t>(used_++)] = {is_stored(bytes), slot};
    const auto* const blocks = static_cast<const std::byte*>(in);
    if (is_stored(bytes)) {
      store(blocks, stride_bytes, bytes, out, s.compute);
    } else {
      copy(blocks, stride_bytes, bytes, out, slot, s);
    }
    return out;
  }

  void store([[maybe_unused]] const std::byte* in, [[maybe_unused]] std::size_t stride_bytes,
             [[maybe_unused]] std::size_t bytes, [[maybe_unused]] std::byte* out, [[maybe_unused]] stream_type s) {
    if constexpr (Stores::exist) {
      std::byte* const own = out + static_cast<std::size_t>(peers_.rank()) * bytes;
      stores_->move(in, stride_bytes, bytes, own, std::exchange(stores_to_release_, 0), ctas_of(plan_.stores, bytes),
                    s);
    }
  }

  /// The peers wait for the transfers, so these never cross streams; the own block does, which hides behind them.
  void copy(const std::byte* in, std::size_t stride_bytes, std::size_t bytes, std::byte* out, int slot,
            const StreamPair& s) {
    const auto rank = static_cast<std::size_t>(peers_.rank());
    std::byte* const own = out + rank * bytes;
    const std::byte* const own_in = in + rank * stride_bytes;
    const bool is_beside = own != own_in && bytes >= plan_.beside_bytes;
    if (is_beside) {
      executor_.record(input_ready_, s.compute);
      executor_.wait(s.comm, input_ready_);
      executor_.copy(own, own_in, bytes, s.comm);
      executor_.record(own_ready_, s.comm);
    }
    detail::for_each_peer(peers_, [&](int peer) {
      std::byte* const to = peers_.base(peer) + (own - peers_.base(peers_.rank()));
      peers_.await(peer, detail::free_channel(slot), s.compute);
      executor_.copy(to, in + static_cast<std::size_t>(peer) * stride_bytes, bytes, s.compute);
      peers_.signal(peer, detail::full_channel(slot), s.compute);
    });
    if (own != own_in && !is_beside) executor_.copy(own, own_in, bytes, s.compute);
    detail::await_peers(peers_, detail::full_channel(slot), s.compute);
    if (is_beside) executor_.wait(s.compute, own_ready_);
  }

  PeerCollectivesPlan plan_;
  Executor executor_;
  Peers peers_;
  std::optional<Stores> stores_;
  Kind copied_, stored_;
  std::array<Result, peer_slots> results_ = {};  // in use, the oldest first
  int used_ = 0;
  int stores_to_release_ = 0;
  typename Executor::event_type input_ready_, own_ready_;
};

/// Binds a plan to a group and the memory that `plan.footprint()` asks for. No communication beyond signals in the
/// arena; every rank of the arena binds the same operations in the same order. `s`: where the first credits are given;
/// calls come after it. `deadline`: how long a kernel of stores waits for a peer (C27). Errors: comm_error C29, C08;
/// shape_error T02; C20, C28.
template <class Stores = NoStores, executor Executor, communicator Comm, symmetric_arena Arena>
PeerCollectives<Executor, detail::peers_of<Arena>, Stores> bind(
    const PeerCollectivesPlan& plan, Executor executor, const GroupComm<Comm>& group, const Memory<Arena>& memory,
    typename Executor::stream_type s = only_stream<typename Executor::stream_type>(),
    std::chrono::milliseconds deadline = std::chrono::seconds(120)) {
  auto peers = detail::open_window("peer collectives", plan.ranks, group, memory, plan.footprint().symmetric,
                                   plan.footprint().channels);
  return {plan, executor, std::move(peers), memory.persistent, deadline, s};
}

}  // namespace pleat::inline v0
