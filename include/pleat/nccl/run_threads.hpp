// run_nccl_threads: how a program asks for ranks that are threads of its own process, with a GPU each.
#pragma once

#include <pleat/comm/run_ranks.hpp>
#include <pleat/nccl/comm.hpp>
#include <pleat/nccl/thread_link.hpp>

namespace pleat::inline v0 {

/// Runs `f(NcclComm& world)` on `ranks` threads, rank r on device r, and joins them.
/// Errors: as `run_ranks`; as NcclComm::create.
template <class F>
void run_nccl_threads(int ranks, F&& f, NcclOptions options = {}) {
  auto post = std::make_shared<detail::ThreadPost>(std::max(1, ranks));
  run_ranks(ranks, [&](ThreadComm& host) {
    NcclComm world = NcclComm::create(std::make_unique<ThreadLink>(post, host.rank()),
                                      host.rank() % std::max(1, cuda_device_count()), options);
    const auto report = [&](const char* why) {
      // The run hears of it before the job does, so that it blames this rank and not one that this rank's end ends.
      host.world()->enter(host.rank(), world.job().last_operation());
      host.world()->fail(host.rank(), why);
      world.abandon(why);
    };
    try {
      f(world);
    } catch (const std::exception& e) {
      report(e.what());
      throw;
    } catch (...) {
      report("an exception that is no std::exception");
      throw;
    }
  });
}

}  // namespace pleat::inline v0
