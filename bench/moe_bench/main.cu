// moe_bench: what dispatch, combine, their gradients and a whole layer cost on two GPUs, by part and by budget of
// multiprocessors, beside what their bytes take on the wire and in memory, and beside NCCL. Ranks are threads, then
// processes.
//
//   moe_bench [--mode threads|processes] [--only <rows>] [--json <file>] [--check]
//
// rows: ops parts layer (all when none is named). Exit code 77 where there are fewer than two GPUs; 1 when time is up;
// 3 with --check when a bar is missed.
#include "../two_ranks.hpp"
#include "rows.cuh"

namespace {

int work(pleat::NcclComm& world, pleat::CudaThreadComm*, const two_ranks::Options& options) {
  comm_bench::Report report(world.rank() == 0, options.worker, options.json);
  moe_bench::Rows(world, report, options.value("--only")).run();
  if (world.rank() == 0) {
    std::printf("\n%s: %d of %d bars hold\n", options.worker.c_str(), report.bars() - report.missed(), report.bars());
  }
  return options.check && report.missed() > 0 ? 3 : 0;
}

}  // namespace

int main(int argc, char** argv) {
  return two_ranks::run("moe_bench", argc, argv, {"--only"}, work);
}
