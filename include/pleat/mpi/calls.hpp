// The calls of a group's ranks as texts that they send each other.
#pragma once

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include <pleat/comm/call_agreement.hpp>

namespace pleat::inline v0::detail {

/// What of a call others must know, with its operation's name; counts follow.
struct PackedCall {
  char operation[24];
  DType dtype;
  std::uint8_t must_agree, count_lists;
  std::int32_t root;
  std::uint64_t elems, send_counts, recv_counts;
};

inline std::string packed(const Call& call) {
  PackedCall head{};
  std::strncpy(head.operation, call.operation, sizeof head.operation - 1);
  head.dtype = call.dtype;
  head.must_agree = call.must_agree;
  head.count_lists = static_cast<std::uint8_t>(call.count_lists);
  head.root = call.root;
  head.elems = call.elems;
  head.send_counts = call.send.size();
  head.recv_counts = call.recv.size();
  std::string text(reinterpret_cast<const char*>(&head), sizeof head);
  for (const Counts counts : {call.send, call.recv}) {
    text.append(reinterpret_cast<const char*>(counts.data()), counts.size_bytes());
  }
  return text;
}

/// Every rank's call, read from its text.
class GatheredCalls {
 public:
  explicit GatheredCalls(const std::vector<std::string>& texts) : heads_(texts.size()), counts_(2 * texts.size()) {
    for (std::size_t r = 0; r < texts.size(); ++r) {
      PackedCall& head = heads_[r];
      std::memcpy(&head, texts[r].data(), sizeof head);
      const char* from = texts[r].data() + sizeof head;
      for (std::size_t list = 0; list < 2; ++list) {
        std::vector<std::size_t>& counts = counts_[2 * r + list];
        counts.resize(list == 0 ? head.send_counts : head.recv_counts);
        if (!counts.empty()) std::memcpy(counts.data(), from, counts.size() * sizeof counts[0]);
        from += counts.size() * sizeof counts[0];
      }
      calls_.push_back({.operation = head.operation,
                        .dtype = head.dtype,
                        .elems = head.elems,
                        .root = head.root,
                        .send = counts_[2 * r],
                        .recv = counts_[2 * r + 1],
                        .count_lists = head.count_lists,
                        .must_agree = head.must_agree != 0});
    }
  }
  // The calls point into it.
  GatheredCalls(GatheredCalls&&) = default;
  GatheredCalls& operator=(GatheredCalls&&) = default;

  const Call& of(int rank) const { return calls_[static_cast<std::size_t>(rank)]; }
  std::span<const Call> all() const { return calls_; }

 private:
  std::vector<PackedCall> heads_;
  std::vector<std::vector<std::size_t>> counts_;
  std::vector<Call> calls_;
};

}  // namespace pleat::inline v0::detail
