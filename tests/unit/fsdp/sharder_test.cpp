// Sharded training on host ranks equals one rank's arithmetic bit for bit: group sizes, replicas, experts, transports,
// dtypes, prefetch, accumulation; with random delays and memory that starts as NaN.
#include <pleat/fsdp/sharder.hpp>

#include "training_run.hpp"

namespace {

using namespace fsdp_testing;
using testing_support::JitterExecutor;

std::int64_t fresh_seed() {
  return static_cast<std::int64_t>(std::random_device{}());
}

template <class T, class G = accumulator_t<T>, class Executor = JitterExecutor>
void train(const RunConfig& config) {
  const std::int64_t seed = fresh_seed();
  CAPTURE(seed);
  CAPTURE(config.ranks);
  CAPTURE(config.ep);
  CAPTURE(config.replicas);
  CAPTURE(config.prefetch);
  CAPTURE(config.micro_batches);
  CAPTURE(name_of(config.transport));
  CHECK_NOTHROW((TrainingRun<T, G, Executor>(config, seed).run()));
}

constexpr Transport transports[] = {Transport::collective, Transport::peer};

TEST_CASE("every group size, on both transports") {
  for (const Transport transport : transports) {
    for (const int ranks : {1, 2, 3, 4, 5, 8}) train<float>({.ranks = ranks, .transport = transport});
  }
}

TEST_CASE("micro-batches accumulate, and units are fetched ahead as far as planned") {
  for (const Transport transport : transports) {
    for (const int prefetch : {0, 1, 2, 9}) {
      train<float>({.ranks = 3, .transport = transport, .prefetch = prefetch, .micro_batches = 3});
    }
  }
}

TEST_CASE("ranks alone write their shards, whatever each micro-batch leaves out") {
  for (const Transport transport : transports) {
    train<float>({.transport = transport, .micro_batches = 4});
    train<bfloat16>({.transport = transport, .micro_batches = 3});
    train<bfloat16, bfloat16>({.transport = transport, .micro_batches = 3});
    train<float>({.ranks = 3, .replicas = 3, .transport = transport, .micro_batches = 3});
    train<double>({.ranks = 4, .ep = 4, .transport = transport, .micro_batches = 3});
  }
}

TEST_CASE("replicas and experts: shards of each kind, sums over each group, replicas once") {
  for (const Transport transport : transports) {
    train<float>({.ranks = 4, .ep = 2, .transport = transport, .micro_batches = 2});
    train<float>({.ranks = 6, .ep = 3, .transport = transport, .experts = 3});
    train<float>({.ranks = 4, .ep = 4, .transport = transport});
    train<float>({.ranks = 4, .replicas = 2, .transport = transport, .micro_batches = 3});
    train<float>({.ranks = 8, .ep = 2, .replicas = 2, .transport = transport, .micro_batches = 2});
    train<float>({.ranks = 3, .replicas = 3, .transport = transport});
  }
}

TEST_CASE("dtypes: float64 throughout; bfloat16 copies of float masters; gradients that travel as bfloat16") {
  for (const Transport transport : transports) {
    const RunConfig config{.ranks = 3, .replicas = 1, .transport = transport, .micro_batches = 2};
    train<double>(config);
    train<bfloat16>(config);
    train<bfloat16, bfloat16>(config);
  }
}

TEST_CASE("shards that are empty, and shards that are large") {
  for (const Transport transport : transports) {
    train<float>({.ranks = 5, .transport = transport, .alignment_elems = 1, .width = 1});
    train<float>({.ranks = 8, .transport = transport, .alignment_elems = 128, .width = 2});
    train<float>({.ranks = 3, .transport = transport, .micro_batches = 2, .width = 60});
  }
}

TEST_CASE("without delays") {
  for (const Transport transport : transports) {
    train<float, float, HostExecutor>({.ranks = 4, .ep = 2, .replicas = 2, .transport = transport, .micro_batches = 2});
  }
}

}  // namespace
