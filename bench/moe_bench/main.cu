// moe_bench: what dispatch, combine, their gradients and a whole layer cost on several GPUs, by part and by budget of
// multiprocessors, beside what their bytes take on the wire and in memory, and beside NCCL. Ranks are threads, then
// processes.
//
//   moe_bench [--ranks <number>] [--mode threads|processes] [--only <rows>] [--json <file>] [--check]
//
// rows: ops budgets parts layer (all when none is named). Exit code 77 where there are fewer GPUs than ranks (two); 1
// when time is up; 3 with --check when a bar is missed.
#include "../gpu_ranks.hpp"
#include "rows.cuh"

namespace {

int work(pleat::NcclComm& world, pleat::CudaThreadComm*, const gpu_ranks::Options& options) {
  comm_bench::Report report(world.rank(), world.size(), options.worker, options.json);
  moe_bench::Rows(world, report, options.value("--only")).run();
  return report.verdict(options.check);
}

}  // namespace

int main(int argc, char** argv) {
  return gpu_ranks::run("moe_bench", argc, argv, {"--only"}, work);
}
