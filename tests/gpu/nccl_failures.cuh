// One rank fails in the middle of an operation; the other must end with an error that names it, in time.
#pragma once

#include <csignal>

#include <conformance/failures.hpp>
#include <conformance/peer_access.hpp>

#include "nccl_backend.cuh"

namespace nccl_testing {

using Site = conformance::Site<NcclThreads, pleat::NcclComm>;

enum class Way { throws, returns, hangs, is_killed };
inline const char* name_of(Way way) {
  const char* names[] = {"throws", "returns", "hangs", "is killed"};
  return names[static_cast<int>(way)];
}

inline constexpr std::chrono::milliseconds deadline = 600ms;
inline constexpr int failing_rank = 1;

/// What rank 0 waits in: an operation that is done on rank 0 only with data of rank 1's.
struct Waiting {
  const char* name;  // as errors have it
  void (*call)(Site&);
};
/// The root of a small broadcast is done without the others, so that it must be the rank that fails.
inline void broadcast_from_failing_rank(Site& site) {
  DeviceBuffer buffer(4);
  site.comm.broadcast(buffer.block().data, 1, failing_rank, pleat::DType::f32, site.s());
  site.finish();
}
inline std::vector<Waiting> waitings() {
  std::vector<Waiting> all;
  for (const auto& operation : conformance::operations<Site>) {
    const bool has_root = std::string_view(operation.name) == "broadcast";
    all.push_back({operation.name, has_root ? broadcast_from_failing_rank : operation.call});
  }
  return all;
}

/// Rank 1's part when it fails. It does not come back from being killed.
inline void fail_by(Way way) {
  std::this_thread::sleep_for(30ms);  // rank 0 is in the operation by now
  if (way == Way::throws) throw conformance::Boom("boom 17");
  if (way == Way::hangs) std::this_thread::sleep_for(deadline + 800ms);  // rank 0 asks for 500 ms before it gives up
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

/// What a rank saw of a failure.
struct Seen {
  std::string text = "nothing";
  std::chrono::milliseconds after{};
};
template <class F>
Seen see(F f) {
  Seen seen;
  const auto start = std::chrono::steady_clock::now();
  try {
    f();
  } catch (const std::exception& e) {
    seen.text = e.what();
  }
  seen.after = std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - start);
  return seen;
}

/// Throws unless what rank 0 saw is right. `operation` is empty for a signal: a rank that returns then waits for its
/// peers as its arena goes, so that either of the two may give up first.
inline void require_outcome(const Seen& seen, const char* operation, Way way) {
  const char* ids[] = {"pleat[C02]", "pleat[C03]", "pleat[C04]", "pleat[C02]"};
  const char* parts[] = {"boom 17", "rank 1 has returned", "rank 1, which neither waits nor checks", "rank 1 died"};
  const int i = static_cast<int>(way);
  if (*operation == 0 && way == Way::returns) ids[i] = "pleat[C0", parts[i] = "closing an arena";
  for (const char* part : {ids[i], parts[i], "rank 1", operation}) {
    conformance::require(seen.text.find(part) != std::string::npos, "rank 0 saw `", seen.text, "` after ",
                         seen.after.count(), " ms, without ", part);
  }
  conformance::require(seen.after < deadline + 4s, "rank 0 saw `", seen.text, "` only after ", seen.after.count(),
                       " ms");
}

/// A healthy run on the same GPUs.
inline void healthy(pleat::NcclComm& world) {
  Site site(world, world);
  conformance::all_gather_once(site, 1000, pleat::DType::f32, false, 7);
  conformance::all_to_all_once(site, 1000, pleat::DType::bf16, 8);
}

}  // namespace nccl_testing
