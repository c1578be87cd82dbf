// The messages of a batch that a rank sends to itself: which send goes to which receive.
#pragma once

#include <span>

#include <pleat/comm/communicator.hpp>
#include <pleat/core/error.hpp>

namespace pleat::inline v0::detail {

/// f(send, receive) for each message of `rank` to itself; null where there are fewer of one kind.
template <class F>
void for_own_messages(int rank, std::span<const Send> tx, std::span<const Recv> rx, F f) {
  const auto next = [rank](auto& messages) {
    while (!messages.empty() && messages.front().peer != rank) messages = messages.subspan(1);
    const auto* const own = messages.empty() ? nullptr : &messages.front();
    if (own != nullptr) messages = messages.subspan(1);
    return own;
  };
  for (;;) {
    const Send* const send = next(tx);
    const Recv* const recv = next(rx);
    if (send == nullptr && recv == nullptr) return;
    f(send, recv);
  }
}

/// Errors: comm_error C06 when they do not match; `world_rank` names the rank.
inline void check_own_messages(int rank, int world_rank, std::span<const Send> tx, std::span<const Recv> rx) {
  int sent = 0, received = 0;
  bool all_match = true;
  for_own_messages(rank, tx, rx, [&](const Send* send, const Recv* recv) {
    sent += send != nullptr;
    received += recv != nullptr;
    all_match = all_match && send != nullptr && recv != nullptr && send->elems == recv->elems;
  });
  if (all_match) return;
  fail<comm_error>("pleat[C06]: rank ", world_rank, " sends ", sent, " messages to itself and receives ", received,
                   "; their numbers and sizes must agree");
}

}  // namespace pleat::inline v0::detail
