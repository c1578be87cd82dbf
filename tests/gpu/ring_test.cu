// Ring attention with its own kernels on ranks that share one GPU or all: float64 on one rank is the measure, and the
// bits depend on nothing but the problem and the number of ranks. Exit code 77 where there is no GPU.
#define DOCTEST_CONFIG_DISABLE  // the backends of the conformance suites serve here without the suites
#include <cstdio>
#include <cstring>

#include <pleat/attention/cuda/cuda_attention.cuh>
#include <pleat/cuda/leaf.cuh>

#include <conformance/cuda_threads.hpp>
#include <support/repeats.hpp>
#include <unit/attention/oracle.hpp>

#include "delays.cuh"
#include "ring_calls.hpp"
#include "skip.hpp"

template <>
struct pleat::attention_leaf<pleat::cuda_device>
    : pleat::CudaAttention<pleat::TypeList<pleat::bfloat16, pleat::float16>,
                           pleat::HeadDimsList<pleat::HeadDims<64, 64>, pleat::HeadDims<192, 128>>> {};

namespace {

using namespace pleat;
using namespace std::chrono_literals;
using conformance::require;
using oracle::Inputs;
using oracle::Outputs;
using oracle::Problem;
using templates_testing::DelayingExecutor;

/// A problem, its inputs in T, the answer, and the errors of one rank, which the ring's are measured by.
struct Asked {
  Problem problem;
  Inputs in;
  Outputs exact;
  std::vector<double> alone{};
};
using Member = std::vector<double> Outputs::*;
constexpr Member members[] = {&Outputs::out, &Outputs::dq, &Outputs::dk, &Outputs::dv};
constexpr const char* names[] = {"out", "dq", "dk", "dv"};

std::vector<Problem> problems() {
  const auto packed = [](std::vector<std::int64_t> lengths, std::int64_t padding = 0) {
    Problem p{.q_heads = 4, .kv_heads = 2, .qk_dim = 64, .v_dim = 64, .cu_seqlens = {0}};
    for (const std::int64_t length : lengths) p.cu_seqlens.push_back(p.cu_seqlens.back() + length);
    p.tokens = p.cu_seqlens.back() + padding;
    return p;
  };
  std::vector<Problem> all{
      {.tokens = 480, .q_heads = 4, .kv_heads = 2, .qk_dim = 64, .v_dim = 64},
      {.batch = 2, .tokens = 331, .q_heads = 2, .kv_heads = 2, .qk_dim = 64, .v_dim = 64, .causal = false},
      {.tokens = 240, .q_heads = 8, .kv_heads = 2, .qk_dim = 192, .v_dim = 128},
      packed({113}),
      packed({9, 7, 8, 12, 8, 12}),
      packed({2, 1, 0, 13}),
      packed({0, 0, 1, 0}, 3),
      packed({100, 0, 3, 260, 1, 1, 40}, 7),
      {.tokens = 48, .q_heads = 3, .kv_heads = 1, .qk_dim = 20, .v_dim = 5}};
  all.push_back(packed({150, 90, 5}, 2));
  all.back().causal = false;
  return all;
}
/// Large enough for errors to be averages, which a ring may not exceed by more than 5 %.
bool is_large(const Problem& p) {
  return p.tokens >= 240;
}

bool same_bits(const Outputs& a, const Outputs& b) {
  const auto same = [](const std::vector<double>& x, const std::vector<double>& y) {
    return x.size() == y.size() && (x.empty() || std::memcmp(x.data(), y.data(), x.size() * sizeof(double)) == 0);
  };
  bool all = same(a.lse, b.lse);
  for (const Member member : members) all = all && same(a.*member, b.*member);
  return all;
}
void check_lse(const std::vector<double>& got, const std::vector<double>& want) {
  for (std::size_t i = 0; i < want.size(); ++i) {
    require(got[i] == want[i] || std::abs(got[i] - want[i]) < 1e-5 * std::max(1.0, std::abs(want[i])), "lse [", i,
            "] is ", std::to_string(got[i]).c_str(), ", not ", std::to_string(want[i]).c_str());
  }
}

struct Variation {
  Transport transport = Transport::collective;
  int max_ctas = 0, calls = 1;
  bool has_delays = false, places = false;  // places: documents are given to forward, not to the plan
};

template <class Backend, class T>
class Checks {
 public:
  Checks(std::vector<Asked>& asked, int ranks) : asked_(asked), ranks_(ranks) {}

  /// Runs all problems; returns the worst ratio of a ring's error to that of one rank.
  double run() {
    const std::vector<Outputs> first = results({});
    double worst = 0;
    for (std::size_t i = 0; i < asked_.size(); ++i) worst = std::max(worst, check(i, first[i]));
    std::vector<Variation> variations{{Transport::peer},
                                      {Transport::collective, 5, 2, true},
                                      {Transport::peer, 17, 3, true},
                                      {Transport::peer, 0, 2, true, true},
                                      {Transport::collective, 0, 1, false, true}};
    for (int i = 0; i < testing_support::repeats(10); ++i) {
      variations.push_back(
          {i % 2 == 0 ? Transport::peer : Transport::collective, i % 3 == 0 ? 0 : 1 + i, 1 + i % 3, true});
    }
    for (const Variation& v : variations) {
      const std::vector<Outputs> again = results(v);
      for (std::size_t i = 0; i < asked_.size(); ++i) {
        require(same_bits(first[i], again[i]), "problem ", i, ": other bits by ", name_of(v.transport), ", ",
                v.max_ctas, " CTAs, ", v.calls, " calls");
      }
      runs_ += static_cast<int>(asked_.size());
    }
    return worst;
  }
  int runs() const { return runs_; }

 private:
  std::vector<Outputs> results(const Variation& v) {
    std::vector<Outputs> got;
    for (const Asked& a : asked_) got.push_back(templates_testing::poisoned_outputs(a.problem, a.in));
    Backend::run(ranks_, 60s, [&](typename Backend::comm_type& world) {
      for (std::size_t i = 0; i < asked_.size(); ++i) {
        const auto executor = [&](int rank, const Streams<cudaStream_t>& s) {
          const cudaStream_t late[] = {s.compute, s.comm, nullptr};
          return v.has_delays ? DelayingExecutor(std::random_device{}() + static_cast<unsigned>(rank), late[i % 3])
                              : DelayingExecutor();
        };
        templates_testing::run_ring<Backend, T>(world, asked_[i].problem, asked_[i].in, v.transport, v.calls, executor,
                                                got[i], v.max_ctas, v.places && !asked_[i].problem.cu_seqlens.empty());
      }
    });
    return got;
  }
  double check(std::size_t i, const Outputs& got) {
    Asked& a = asked_[i];
    check_lse(got.lse, a.exact.lse);
    double worst = 0;
    for (std::size_t m = 0; m < std::size(members); ++m) {
      const double error = oracle::relative_l2(got.*members[m], a.exact.*members[m]);
      const double most = std::is_same_v<T, bfloat16> ? 8e-3 : 1e-3;
      require(error <= most, "problem ", i, ": ", names[m], " is off by ", std::to_string(error).c_str());
      if (ranks_ == 1) a.alone.push_back(error);
      if (!is_large(a.problem)) continue;
      const double ratio = error / a.alone[m];
      require(ratio <= 1.05, "problem ", i, ": the error of ", names[m], " is ", std::to_string(ratio).c_str(),
              " times that of one rank");
      worst = std::max(worst, ratio);
    }
    return worst;
  }

  std::vector<Asked>& asked_;
  int ranks_, runs_ = 0;
};

template <class Backend, class T>
bool check(const char* where, std::vector<Asked>& asked, int ranks) {
  testing_support::Watchdog watchdog(where, 120s);
  const auto start = std::chrono::steady_clock::now();
  Checks<Backend, T> checks(asked, ranks);
  std::string failure;
  double worst = 0;
  try {
    worst = checks.run();
  } catch (const std::exception& e) {
    failure = e.what();
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  std::printf("%-6s %-12s %-4s %d ranks: error %.3f of one rank's; %d runs of equal bits; %.1f s %s\n",
              failure.empty() ? "ok" : "FAILED", where, name_of(dtype_of<T>), ranks, worst, checks.runs(), took.count(),
              failure.c_str());
  return failure.empty();
}

template <class T>
int check_all(int devices) {
  std::vector<Asked> asked;
  for (const Problem& p : problems()) {
    Inputs in = oracle::draw(p, std::random_device{}(), [](double value) {
      return static_cast<double>(static_cast<float>(T(static_cast<float>(value))));
    });
    Outputs exact = oracle::solve(p, in);
    asked.push_back({p, std::move(in), std::move(exact)});
  }
  int failed = 0;
  for (const int ranks : {1, 2, 3, 4, 8}) failed += !check<conformance::CudaThreads<1>, T>("one GPU", asked, ranks);
  if (devices < 2) {
    std::printf("skipped: ranks on all GPUs, 2 are needed\n");
  } else {
    for (const int ranks : {2, 4}) failed += !check<conformance::CudaThreads<0>, T>("all GPUs", asked, ranks);
  }
  return failed;
}

}  // namespace

int main() {
  if (gpu_testing::lacks_gpus(1)) return gpu_testing::skipped;
  const int devices = cuda_device_count();
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const int failed = check_all<bfloat16>(devices) + check_all<float16>(devices);
  std::printf(failed == 0 ? "all passed\n" : "%d FAILED\n", failed);
  return failed == 0 ? 0 : 1;
}
