// fsdp_bench: what sharded training costs on two GPUs beside the computation alone, the bare transfers and NCCL. Ranks
// are threads, then processes. The gradients of every timed step are compared bit by bit with sums computed without
// communication; slots and gradient units hold NaN before each step, and slots again after each use.
//
//   fsdp_bench [--mode threads|processes] [--only <rows>] [--json <file>] [--check] [--trace <file>]
//
// rows: gather reduce wire small large models replicas sweep (all but the sweep when none is named). --trace writes
// when each part of a step ran, for timeline.py. Exit code 77 where there are fewer than two GPUs; 1 when data is wrong
// or time is up; 3 with --check when a bar is missed.
#include "../two_ranks.hpp"
#include "rows.cuh"

namespace {

int work(pleat::NcclComm& world, pleat::CudaThreadComm*, const two_ranks::Options& options) {
  comm_bench::Report report(world.rank() == 0, options.worker, options.json);
  const bool is_right = fsdp_bench::Rows(world, report, options.value("--only"), options.value("--trace")).run();
  if (world.rank() == 0) {
    std::printf("\n%s: %d of %d bars hold\n", options.worker.c_str(), report.bars() - report.missed(), report.bars());
  }
  return !is_right ? 1 : options.check && report.missed() > 0 ? 3 : 0;
}

}  // namespace

int main(int argc, char** argv) {
  return two_ranks::run("fsdp_bench", argc, argv, {"--only", "--trace"}, work);
}
