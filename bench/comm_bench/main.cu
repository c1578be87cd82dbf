// comm_bench: what moving bytes between two GPUs costs, for every operation of the library, beside the bare transfers
// and NCCL in the same run. Ranks are threads, then processes.
//
//   comm_bench [--quick] [--mode threads|processes] [--json <file>] [--check]
//
// Exit code 77 where there are fewer than two GPUs; 1 when data is wrong or time is up; 3 with --check when a bar is
// missed.
#include "../two_ranks.hpp"
#include "bench.cuh"

namespace {

using namespace comm_bench;

std::vector<std::size_t> sizes_of(const two_ranks::Options& options) {
  if (options.quick) return {4 * kib, 64 * kib, mib, 8 * mib, 128 * mib};
  return {4 * kib, 16 * kib, 64 * kib, 256 * kib, mib,       2 * mib,   4 * mib,
          8 * mib, 16 * mib, 32 * mib, 64 * mib,  128 * mib, 512 * mib, 1024 * mib};
}

/// One rank; the exit code.
int work(pleat::NcclComm& world, pleat::CudaThreadComm* threads, const two_ranks::Options& options) {
  const std::vector<std::size_t> sizes = sizes_of(options);
  Site site(world, sizes.back(), PeerOperations::window_bytes(sizes.back()));
  PeerOperations peer(site, sizes.back());
  Report report(world.rank() == 0, options.worker, options.json);
  Bench(site, peer, report, threads).run(sizes);
  if (world.rank() == 0) {
    std::printf("\n%s: %d of %d bars hold\n", options.worker.c_str(), report.bars() - report.missed(), report.bars());
  }
  return options.check && report.missed() > 0 ? 3 : 0;
}

}  // namespace

int main(int argc, char** argv) {
  return two_ranks::run("comm_bench", argc, argv, {}, work);
}
