// Muon on two GPUs, a rank of NCCL on each: shards and replicas have the bits of one rank. Exit code 77 where there are
// fewer than two GPUs.
#include <cstdlib>
#include <random>

#include <pleat/nccl/run_threads.hpp>

#include "muon_training.cuh"
#include "skip.hpp"

namespace {

using namespace muon_testing;

void on_nccl(int ranks, auto f) {
  run_nccl_threads(ranks, [&](NcclComm& world) { f(CudaSite(), world); }, {.deadline = std::chrono::seconds(20)});
}

template <class Compute>
void check_products(const optim::MuonOptions& muon) {
  const unsigned seed = std::random_device{}();
  const auto run = [](int ranks, auto f) { on_nccl(ranks, f); };
  const auto whole = trained<Compute>(run, optim_testing::small_model(), {}, {.muon = muon}, seed);
  check_meshes<Compute>(std::string("products in ") + name_of(muon.product), run, {{2, 1, 1}, {2, 2, 1}, {2, 1, 2}},
                        muon, seed, whole);
}

}  // namespace

int main() {
  // A kernel that is loaded at its first launch may wait for the device, and so for a peer.
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  setenv("NCCL_NVLS_ENABLE", "0", 1);
  if (gpu_testing::lacks_gpus(2)) return gpu_testing::skipped;
  try {
    check_products<double>({.product = DType::f64});
    check_products<float>({.form = optim::MuonForm::moonlight, .product = DType::f32});
    check_products<bfloat16>({.product = DType::bf16});
  } catch (const std::exception& e) {
    expect(false, e.what());
  }
  std::printf("%s\n", failures == 0 ? "passed" : "failed");
  return failures != 0;
}
