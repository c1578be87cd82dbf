// Which choices of a token count: the one rule that router, losses and dispatch share.
#pragma once

#include <cstdint>

#include <pleat/core/config.hpp>

namespace pleat::inline v0::moe::detail {

/// Whether choice j of a token is routed: its id is an expert, and no earlier choice of the token has it.
PLEAT_HD inline bool is_routed(const std::int32_t* ids, int j, int experts) {
  if (ids[j] < 0 || ids[j] >= experts) return false;
  for (int i = 0; i < j; ++i) {
    if (ids[i] == ids[j]) return false;
  }
  return true;
}

/// Whether any choice of a token is routed.
PLEAT_HD inline bool is_routed_token(const std::int32_t* ids, int k, int experts) {
  for (int j = 0; j < k; ++j) {
    if (is_routed(ids, j, experts)) return true;
  }
  return false;
}

}  // namespace pleat::inline v0::moe::detail
