// Whether the calls that the ranks of a group make fit together: all make the same, with arguments that agree.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

#include <pleat/comm/communicator.hpp>
#include <pleat/core/error.hpp>

namespace pleat::inline v0::detail {

/// The arguments of one rank's collective call.
struct Call {
  const char* operation = "";
  DType dtype = DType::u8;
  std::size_t elems = 0;
  int root = 0;
  const void* in = nullptr;
  void* out = nullptr;
  Counts send{};
  Counts recv{};
  int count_lists = 0;     // 0: none; 1: recv; 2: send and recv
  bool must_agree = true;  // split's color and key differ by design
};

/// The calls of a group's ranks, and what the world calls these.
struct Calls {
  std::span<const Call> calls;
  std::span<const int> world_ranks;

  /// The first way in which the calls do not fit together, as the text of C05; empty when they do.
  Message disagreement() const {
    const Call& first = calls[0];
    for (std::size_t r = 0; r < calls.size(); ++r) {
      const Call& call = calls[r];
      // Literals with equal text may have different addresses.
      if (std::string_view(call.operation) != first.operation) return differs(r, "; all ranks must call the same");
      if (!call.must_agree) continue;
      if (call.dtype != first.dtype) return differs(r, "; dtypes ", call.dtype, " and ", first.dtype, " must agree");
      if (call.elems != first.elems) return differs(r, "; elems ", call.elems, " and ", first.elems, " must agree");
      if (call.root != first.root) return differs(r, "; roots ", call.root, " and ", first.root, " must agree");
      if (call.root < 0 || call.root >= size()) return wrong(r, "; root ", call.root, " is not in 0 to ", size() - 1);
      if (call.count_lists >= 1 && call.recv.size() != calls.size()) return miscounts(r, call.recv);
      if (call.count_lists == 2 && call.send.size() != calls.size()) return miscounts(r, call.send);
    }
    for (std::size_t r = 0; r < calls.size(); ++r) {
      for (std::size_t p = 0; p < calls[r].recv.size(); ++p) {
        // all_gather_v has no send counts: all give the same list. all_to_all_v: what p sends me is what I receive.
        const std::size_t expected = calls[r].recv[p];
        const bool is_gather = first.count_lists == 1;
        const std::size_t given = is_gather ? first.recv[p] : calls[p].send[r];
        if (expected == given) continue;
        const Message text = wrong(r, "; it expects ", expected, " elements of rank ", world_ranks[p], ", ");
        return is_gather ? message_of(text, "rank ", world_ranks[0], " expects ", given)
                         : message_of(text, "which sends ", given);
      }
    }
    return {};
  }

 private:
  int size() const { return static_cast<int>(calls.size()); }
  template <class... Parts>
  Message wrong(std::size_t rank, const Parts&... parts) const {
    return message_of("pleat[C05]: rank ", world_ranks[rank], " calls ", calls[rank].operation, parts...);
  }
  template <class... Parts>
  Message differs(std::size_t rank, const Parts&... parts) const {
    return wrong(rank, ", rank ", world_ranks[0], " calls ", calls[0].operation, parts...);
  }
  Message miscounts(std::size_t rank, Counts counts) const {
    return wrong(rank, "; it gives ", counts.size(), " counts for ", calls.size(), " ranks");
  }
};

}  // namespace pleat::inline v0::detail
