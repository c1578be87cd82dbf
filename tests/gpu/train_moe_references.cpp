// The host ranks in float64 that the trainer on GPUs is compared with.
#include <algorithm>
#include <future>
#include <mutex>
#include <thread>

#include <train_moe/host/backend.hpp>

#include "train_moe_steps.hpp"

namespace train_moe_testing {

std::int64_t run_references(Options o, Records& records, int batches, double tie,
                            const std::function<void(int, const Outcome::Step&)>& f) {
  o.micro_batch *= o.mesh.dp;
  o.mesh = {};
  o.schedule.reset();
  o.dtype = pleat::DType::f64;
  const int workers = std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, batches);
  std::mutex mutex;
  std::vector<std::future<std::int64_t>> results;
  for (int worker = 0; worker < workers; ++worker) {
    results.push_back(std::async(std::launch::async, [&, worker] {
      BatchWatches<RoutingFollower> followers(
          o, batches, [&](auto& list, int batch) { list.emplace_back(o, records[batch], tie); });
      std::vector<int> own;
      for (int batch = worker; batch < batches; batch += workers) own.push_back(batch);
      Outcome outcome;
      run<train_moe::HostBackend, double>(o, followers, own, outcome);
      const std::lock_guard lock(mutex);
      std::int64_t ties = 0;
      for (std::size_t i = 0; i < own.size(); ++i) {
        f(own[i], outcome.steps[i]);
        ties += followers[own[i]].ties();
      }
      return ties;
    }));
  }
  std::int64_t ties = 0;
  for (auto& result : results) ties += result.get();
  return ties;
}

}  // namespace train_moe_testing
