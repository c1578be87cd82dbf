// comm_bench: what moving bytes between GPUs costs, for every operation of the library, beside the bare transfers
// and NCCL in the same run. Ranks are threads, then processes.
//
//   comm_bench [--ranks <number>] [--quick] [--mode threads|processes] [--json <file>] [--check]
//
// Exit code 77 where there are fewer GPUs than ranks (two); 1 when data is wrong or time is up; 3 with --check when a
// bar is missed.
#include "../gpu_ranks.hpp"
#include "bench.cuh"

namespace {

using namespace comm_bench;

std::vector<std::size_t> sizes_of(const gpu_ranks::Options& options) {
  if (options.quick) return {4 * kib, 64 * kib, mib, 8 * mib, 64 * mib, 128 * mib};
  return {4 * kib, 16 * kib, 64 * kib, 256 * kib, mib,       2 * mib,   4 * mib,
          8 * mib, 16 * mib, 32 * mib, 64 * mib,  128 * mib, 512 * mib, 1024 * mib};
}

/// One rank; the exit code.
int work(pleat::NcclComm& world, pleat::CudaThreadComm* threads, const gpu_ranks::Options& options) {
  const std::vector<std::size_t> sizes = sizes_of(options);
  Site site(world, sizes.back(), PeerOperations::window_bytes(world.size(), sizes.back()));
  PeerOperations peer(site, sizes.back());
  Report report(world.rank(), world.size(), options.worker, options.json);
  Bench(site, peer, report, threads).run(sizes);
  return report.verdict(options.check);
}

}  // namespace

int main(int argc, char** argv) {
  return gpu_ranks::run("comm_bench", argc, argv, {}, work);
}
