// train_moe_mpi: the trainer on host ranks that mpirun has started; without --check, for which ranks share memory.
#include "../program.hpp"
#include "backend.hpp"

#include <vector>

int main(int argc, char** argv) {
  using namespace train_moe;
  const pleat::detail::MpiSession session;
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  std::vector<char*> arguments(argv, argv + argc);
  char quiet[] = "--quiet";
  if (rank != 0) arguments.push_back(quiet);
  return run_program(static_cast<int>(arguments.size()), arguments.data(), [](Run& run) {
    if (run.options.check) throw usage_error("--check is for ranks that are threads; leave it out under mpirun");
    run.options.transport = pleat::Transport::collective;
    if (run.options.dtype == pleat::DType::f64) return run_mesh<MpiBackend, double>(run);
    if (run.options.dtype == pleat::DType::f32) return run_mesh<MpiBackend, float>(run);
    throw usage_error("--dtype bf16 is for GPUs; valid on the host: f64 f32");
  });
}
