// A process that is killed or exits in the middle of an operation: its peer must end with an error that names it, in
// time.
#pragma once

#include <csignal>

#include <conformance/failures.hpp>
#include <conformance/peer_access.hpp>

#include "nccl_backend.cuh"

namespace nccl_testing {

using Site = conformance::Site<NcclRanks, pleat::NcclComm>;

inline constexpr int killed_rank = 1;

/// What rank 0 waits in, by name: an operation, or a signal.
inline constexpr const char* signal_name = "a signal";
inline std::vector<std::string> deadly_operations() {
  std::vector<std::string> names{signal_name};
  for (const auto& operation : conformance::operations<Site>) names.emplace_back(operation.name);
  return names;
}

/// How the process of `killed_rank` ends: without a farewell.
enum class Death { killed, exits };

/// Does not come back.
inline void die(Death death) {
  std::this_thread::sleep_for(30ms);  // rank 0 is in the operation by now
  if (death == Death::killed) ::raise(SIGKILL);
  std::exit(0);  // runs what ends with the program, but no destructor of this thread's
}
inline void wait_for_killed(pleat::NcclComm& world, const std::string& name, Death death) {
  for (const auto& operation : conformance::operations<Site>) {
    if (operation.name != name) continue;
    Site site(world, world);
    operation.call(site, killed_rank);  // so that all is connected
    if (site.rank() == killed_rank) die(death);
    operation.call(site, killed_rank);
  }
  if (name == signal_name) {
    conformance::PeerSite<NcclRanks> site(world);
    auto arena = site.make_arena(4096);
    auto peers = arena.open(site.everybody(), conformance::all_write_bytes(site.size()), 2);
    conformance::all_write_once(site, peers, 0, 1);
    site.finish();
    if (site.rank() == killed_rank) die(death);
    peers.await(killed_rank, 1, site.s());
    site.comm.barrier(site.s());
    site.finish();
  }
}

/// One rank's process. Rank 0 survives, and sees in time who died.
inline void process_dies(const std::string& name, Death death) {
  auto start = std::chrono::steady_clock::now();
  std::string seen = "nothing";
  try {
    pleat::NcclComm world = process_world(0, 20s);
    start = std::chrono::steady_clock::now();
    wait_for_killed(world, name, death);
  } catch (const pleat::comm_error& e) {
    seen = e.what();
  }
  const std::string operation = name == signal_name ? "barrier" : name;
  for (const std::string& part : {std::string("pleat[C02]: rank 1 died"), "rank 0 was in " + operation}) {
    conformance::require(seen.find(part) != std::string::npos, "rank 0 saw `", seen, "`, without ", part);
  }
  conformance::require(std::chrono::steady_clock::now() - start < 10s, "rank 0 saw `", seen, "` too late");
}

/// A healthy run on the same GPUs.
inline void healthy(pleat::NcclComm& world) {
  Site site(world, world);
  conformance::all_gather_once(site, 1000, pleat::DType::f32, false, 7);
  conformance::all_to_all_once(site, 1000, pleat::DType::bf16, 8);
}

}  // namespace nccl_testing
