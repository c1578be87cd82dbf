// How many kernels a ring's forward pass takes, by name: the table from which a plan takes its choice.
#pragma once

#include <cstddef>
#include <cstdint>

#include <pleat/attention/local_kernel.hpp>
#include <pleat/comm/peer_access.hpp>

namespace pleat::inline v0::ring {

/// How forward computes the blocks that a rank meets: each when its step comes, in two slots; or all of them by one
/// kernel, which waits for a block when it comes to it. The running result then never leaves the multiprocessor, and
/// there is one tail of a launch, but all blocks stand in memory side by side. Its bits are its own: rows are rounded
/// once, not once a step, and see keys in the same order. Where a local kernel cannot do it (`AttentionForwardBlocks`),
/// the blocks are computed one by one after they have all come, with the bits of `per_step`.
enum class Launches : unsigned char { per_step, one };
constexpr const char* name_of(Launches launches) {
  return launches == Launches::one ? "one launch" : "a launch per step";
}

/// Ranks of a ring whose forward pass is one launch, at most: those of a node.
inline constexpr int most_ranks_of_one_launch = Arrivals::most_blocks + 1;
/// What other ranks' blocks may take of a rank's memory where a plan chooses one launch.
inline constexpr double most_gathered_bytes = 4.0 * (std::int64_t{1} << 30);

/// Whether it can be one: copies write what the kernel waits for, and what is expanded on arrival is not there yet.
constexpr bool allows_one_launch(int cp, Transport transport, int latent_dim) {
  return cp <= most_ranks_of_one_launch && transport == Transport::peer && latent_dim == 0;
}
/// The choice of a plan that leaves it open. Packed documents make several launches of a step, some of them small, so
/// that one gains 6 % there; for one document it is as fast, to 3 % more or less. `gathered_bytes`: keys and values of
/// all other ranks.
constexpr Launches choose_launches(int cp, Transport transport, int latent_dim, std::size_t documents,
                                   double gathered_bytes) {
  const bool pays = documents > 1 && gathered_bytes <= most_gathered_bytes;
  return cp > 1 && pays && allows_one_launch(cp, transport, latent_dim) ? Launches::one : Launches::per_step;
}

}  // namespace pleat::inline v0::ring
