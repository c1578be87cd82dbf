// What options may be: the limits of single ones, and the rules between them.
#pragma once

#include <limits>
#include <string>

#include "options.hpp"

namespace train_moe {

// The largest that a flag takes: with these, no product of sizes overflows 64 bits, nor int where the trainer uses it.
inline constexpr int most_ranks = 512;  // each is a thread
inline constexpr int most_layers = 1024;
inline constexpr int most_width = 65536;
inline constexpr int most_heads = 4096;
inline constexpr int most_head_dim = 1024;  // of the host's attention kernel, A06
inline constexpr int most_experts = 4096;
inline constexpr int most_sequences = 1 << 20;
inline constexpr int most_sequence = 1 << 20;
inline constexpr long long most_step_tokens = 1LL << 30;
inline constexpr int most_prefetch = 4096;
inline constexpr int most_vocabulary = 1 << 20;
inline constexpr int least_vocabulary = 256;  // bytes
inline constexpr int most_int = std::numeric_limits<int>::max();

/// Derives what was not given, and checks what belongs together. Errors: see parse_options.
void derive_and_check(Options& options);

}  // namespace train_moe
