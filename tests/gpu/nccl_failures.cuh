// One rank fails in the middle of an operation; the other must end with an error that names it, in time.
#pragma once

#include <csignal>

#include <conformance/failures.hpp>
#include <conformance/peer_access.hpp>

#include "nccl_backend.cuh"

namespace nccl_testing {

using namespace std::chrono_literals;
using Site = conformance::Site<NcclThreads, pleat::NcclComm>;

enum class Way { throws, returns, hangs, is_killed };
inline const char* name_of(Way way) {
  const char* names[] = {"throws", "returns", "hangs", "is killed"};
  return names[static_cast<int>(way)];
}

/// What a rank waits in: the operations of a communicator, and a signal that a peer's stream waits for.
struct Waiting {
  const char* name;  // as errors have it
  std::function<void(Site&)> call;
};
inline std::vector<Waiting> waitings() {
  std::vector<Waiting> all;
  for (const auto& operation : conformance::operations<Site>) all.push_back({operation.name, operation.call});
  return all;
}

inline constexpr auto deadline = 2500ms;
inline constexpr int failing_rank = 1;

/// Rank 1's part when it fails. It does not come back from being killed.
inline void fail_by(Way way) {
  if (way == Way::throws) throw conformance::Boom("boom 17");
  if (way == Way::hangs) std::this_thread::sleep_for(deadline + 1500ms);
  if (way == Way::is_killed) ::raise(SIGKILL);
}

/// One rank's side: both make the call once when `is_warm`, so that all is connected; then rank 1 fails.
inline void operation_with_failure(pleat::NcclComm& world, const Waiting& waiting, Way way, bool is_warm) {
  Site site(world, world);
  world.barrier(site.s());
  site.finish();
  if (is_warm) waiting.call(site);
  if (site.rank() == failing_rank) return fail_by(way);
  waiting.call(site);
}
/// The same while a stream waits for a signal: of rank 1 first, and then in an operation that rank 1 does not join.
inline void signal_with_failure(pleat::NcclComm& world, Way way, bool is_warm) {
  conformance::PeerSite<NcclThreads> site(world);
  auto arena = site.make_arena(4096);
  auto peers = arena.open(site.everybody(), conformance::all_write_bytes(site.size()), 2);
  if (is_warm) {
    conformance::all_write_once(site, peers, 0, 1);
    site.finish();
  }
  if (site.rank() == failing_rank) return fail_by(way);
  peers.await(failing_rank, 1, site.s());
  site.comm.barrier(site.s());
  site.finish();
}

/// Throws unless `text`, what rank 0 saw after `took`, is right. `operation` is empty for a signal: a rank that returns
/// then waits for its peers as its arena goes, so that either of the two may give up first.
inline void require_outcome(const std::string& text, const char* operation, Way way, std::chrono::milliseconds took) {
  const char* ids[] = {"pleat[C02]", "pleat[C03]", "pleat[C04]", "pleat[C02]"};
  const char* parts[] = {"boom 17", "rank 1 has returned", "rank 1, which neither waits nor checks", "rank 1 died"};
  const int i = static_cast<int>(way);
  if (*operation == 0 && way == Way::returns) ids[i] = "pleat[C0", parts[i] = "closing an arena";
  for (const char* part : {ids[i], parts[i], "rank 1", operation}) {
    conformance::require(text.find(part) != std::string::npos, "rank 0 saw `", text, "` without ", part);
  }
  conformance::require(took < deadline + 4s, "it took ", took.count(), " ms");
}

/// A healthy run on the same GPUs.
inline void healthy(pleat::NcclComm& world) {
  Site site(world, world);
  conformance::all_gather_once(site, 1000, pleat::DType::f32, false, 7);
  conformance::all_to_all_once(site, 1000, pleat::DType::bf16, 8);
}

}  // namespace nccl_testing
