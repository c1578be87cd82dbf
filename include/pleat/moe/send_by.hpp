// What moves rows to the other ranks: the one table.
#pragma once

#include <pleat/comm/peer_access.hpp>

namespace pleat::inline v0::moe {

/// Rows of tokens, and gradients of results, on their way to the experts' ranks.
enum class SendBy : unsigned char {
  automatic,  ///< as the table says
  stores,     ///< a kernel: rows to the ranks of their experts, into the peers' windows or packed for a collective
  copies,     ///< the copy engine: all rows to all ranks, before routing is planned, and no multiprocessor
};
constexpr const char* name_of(SendBy by) {
  return by == SendBy::automatic ? "automatic" : by == SendBy::stores ? "stores" : "copies";
}

/// The part of all tokens that has an expert on one of `ranks` ranks, for choices drawn evenly.
constexpr double expected_share(int ranks, int k) {
  double without = 1;
  for (int j = 0; j < k; ++j) without *= 1 - 1.0 / ranks;
  return 1 - without;
}

/// Copies send, and get back, rows that nobody asked for; they pay where these are few. Measured on two H200s
/// (bench/moe_bench): the copy engine sends 7 to 10 % more per second than stores, starts while routing is planned,
/// and leaves all multiprocessors to what is planned and placed meanwhile.
constexpr SendBy chosen_sender(Transport transport, int ranks, int k) {
  constexpr double least_share = 0.95;
  return transport == Transport::peer && ranks > 1 && expected_share(ranks, k) >= least_share ? SendBy::copies
                                                                                              : SendBy::stores;
}

}  // namespace pleat::inline v0::moe
