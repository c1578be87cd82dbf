// fsdp_bench: what sharded training costs on several GPUs beside the computation alone, the bare transfers and NCCL.
// Ranks are threads, then processes. The gradients of every timed step are compared bit by bit with sums computed
// without communication; slots and gradient units hold NaN before each step, and slots again after each use.
//
//   fsdp_bench [--ranks <number>] [--mode threads|processes] [--only <rows>] [--json <file>] [--check] [--trace <file>]
//
// rows: gather reduce wire small large models replicas sweep (all but the sweep when none is named). --trace writes
// when each part of a step ran, for timeline.py. Exit code 77 where there are fewer GPUs than ranks (two); 1 when data
// is wrong or time is up; 3 with --check when a bar is missed.
#include "../gpu_ranks.hpp"
#include "rows.cuh"

namespace {

int work(pleat::NcclComm& world, pleat::CudaThreadComm*, const gpu_ranks::Options& options) {
  comm_bench::Report report(world.rank(), world.size(), options.worker, options.json);
  const bool is_right = fsdp_bench::Rows(world, report, options.value("--only"), options.value("--trace")).run();
  return is_right ? report.verdict(options.check) : 1;
}

}  // namespace

int main(int argc, char** argv) {
  return gpu_ranks::run("fsdp_bench", argc, argv, {"--only", "--trace"}, work);
}
