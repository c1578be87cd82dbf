// Ring attention with its own kernels on ranks that share one GPU or all: float64 on one rank is the measure, and the
// bits depend on nothing but the problem, its split and the number of ranks. Arguments: a number of ranks and a dtype,
// which alone are then run. Exit code 77 where there is no GPU.
#define DOCTEST_CONFIG_DISABLE  // the backends of the conformance suites serve here without the suites
#include <cstdio>

#include <pleat/attention/cuda/cuda_attention.cuh>
#include <pleat/cuda/leaf.cuh>

#include <conformance/cuda_threads.hpp>
#include <support/repeats.hpp>
#include <support/watchdog.hpp>
#include <unit/attention/oracle.hpp>

#include "delays.cuh"
#include "ring_bits.cuh"
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
using ring::Layout;
using templates_testing::DelayingExecutor;
using templates_testing::RingHow;

struct Case {
  const char* name;
  Problem problem;
  std::optional<Layout> layout{};
  bool places = false;    // documents may be given to forward as well, with the same split
  bool is_large = false;  // so that errors are averages, which a ring may not exceed by more than 5 %
  double spread = 1;      // of queries: a large one makes a large LSE, and gradients that are small differences
};

std::vector<Case> cases() {
  const auto packed = [](std::vector<std::int64_t> lengths, std::int64_t padding = 0) {
    Problem p{.q_heads = 4, .kv_heads = 2, .qk_dim = 64, .v_dim = 64, .cu_seqlens = {0}};
    for (const std::int64_t length : lengths) p.cu_seqlens.push_back(p.cu_seqlens.back() + length);
    p.tokens = p.cu_seqlens.back() + padding;
    return p;
  };
  std::vector<Case> all{
      {"causal", {.tokens = 480, .q_heads = 4, .kv_heads = 2, .qk_dim = 64, .v_dim = 64}, {}, false, true},
      {"large scores", {.tokens = 480, .q_heads = 4, .kv_heads = 2, .qk_dim = 64, .v_dim = 64}, {}, false, true, 16},
      {"full, odd length, batch",
       {.batch = 2, .tokens = 331, .q_heads = 2, .kv_heads = 2, .qk_dim = 64, .v_dim = 64, .causal = false},
       {},
       false,
       true},
      {"192/128", {.tokens = 240, .q_heads = 8, .kv_heads = 2, .qk_dim = 192, .v_dim = 128}, {}, false, true},
      {"dims 20 and 5", {.tokens = 240, .q_heads = 3, .kv_heads = 1, .qk_dim = 20, .v_dim = 5}}};
  const struct {
    const char *zigzag, *balanced;
    Problem problem;
  } documents[] = {{"one document, zigzag", "one document, balanced", packed({113})},
                   {"six documents, zigzag", "six documents, balanced", packed({9, 7, 8, 12, 8, 12})},
                   {"an empty document, zigzag", "an empty document, balanced", packed({2, 1, 0, 13})},
                   {"one token, zigzag", "one token, balanced", packed({0, 0, 1, 0}, 3)},
                   {"padded documents, zigzag", "padded documents, balanced", packed({100, 0, 3, 260, 1, 1, 40}, 7)}};
  for (const auto& d : documents) {
    all.push_back({d.zigzag, d.problem, Layout::zigzag, true, d.problem.tokens >= 240});
    all.push_back({d.balanced, d.problem, Layout::balanced, false, d.problem.tokens >= 240});
  }
  // A multiple of the chunks of every world: each packing has a balanced split of its own with as many tokens.
  all.push_back({"960 tokens, balanced", packed({400, 10, 250, 100, 100, 60, 33}, 7), Layout::balanced, true, true});
  all.push_back({"full documents", packed({150, 90, 5}, 2), {}, false, true});
  all.back().problem.causal = false;
  return all;
}

/// A case, its inputs in T, the answer, and the errors of one rank, which the ring's are measured by.
struct Asked {
  Case what;
  Inputs in;
  Outputs exact;
  std::vector<double> alone{};
};

struct Variation {
  Transport transport = Transport::collective;
  int max_ctas = 0, calls = 1;
  bool has_delays = false, places = false;  // places: documents are given to forward, not to the plan
  ring::Launches launches = ring::Launches::per_step;
};

template <class Backend, class T>
class Checks {
 public:
  Checks(std::vector<Asked>& asked, int ranks) : asked_(asked), ranks_(ranks) {}

  /// Runs all cases once; the worst ratio of a ring's error to that of one rank, which the ring of one finds out.
  double run_once(const Variation& v = {}) {
    first_ = results(v);
    double worst = 0;
    for (std::size_t i = 0; i < asked_.size(); ++i) worst = std::max(worst, error(i, first_[i]));
    return worst;
  }
  void run_variations() {
    std::vector<Variation> variations{{Transport::peer},
                                      {Transport::collective, 5, 2, true},
                                      {Transport::peer, 17, 3, true},
                                      {Transport::peer, 0, 2, true, true},
                                      {Transport::collective, 0, 1, false, true}};
    for (int i = 0; i < testing_support::repeats(10); ++i) {
      variations.push_back(
          {i % 2 == 0 ? Transport::peer : Transport::collective, i % 3 == 0 ? 0 : 1 + i, 1 + i % 3, true});
    }
    compare(variations);
  }
  void compare(const std::vector<Variation>& variations) {
    for (const Variation& v : variations) {
      const std::vector<Outputs> again = results(v);
      for (std::size_t i = 0; i < asked_.size(); ++i) {
        const Problem& p = asked_[i].what.problem;
        const auto split = templates_testing::ring_plan(p, ranks_, dtype_of<T>, v.transport, how(i, {})).spans;
        const std::string wrong = ring_testing::differences(p, first_[i], again[i], split);
        if (wrong.empty()) {
          ++runs_;
        } else {
          fail("%s: other bits by %s, %s, %d CTAs, %d calls%s%s%s", asked_[i].what.name, name_of(v.transport),
               name_of(v.launches), v.max_ctas, v.calls, v.has_delays ? ", delays" : "", v.places ? ", placed" : "",
               wrong.c_str());
        }
      }
    }
  }
  /// One launch has bits of its own. Those of backward follow from them.
  void run_launches() {
    const auto at_once = [](int max_ctas, int calls, bool has_delays, bool places) {
      return Variation{Transport::peer, max_ctas, calls, has_delays, places, ring::Launches::one};
    };
    worst_at_once_ = run_once(at_once(0, 1, false, false));
    compare({at_once(5, 2, true, false), at_once(0, 3, true, true), at_once(17, 1, false, false)});
  }
  double worst_at_once() const { return worst_at_once_; }
  int runs() const { return runs_; }
  int failures() const { return failures_; }

 private:
  template <class... Values>
  void fail(const char* format, Values... values) {
    constexpr int most_lines = 12;
    if (failures_++ >= most_lines) return;
    std::printf("  FAILED ");
    std::printf(format, values...);
    std::printf("\n");
  }

  RingHow how(std::size_t i, const Variation& v) const {
    const Case& c = asked_[i].what;
    return {v.max_ctas, c.layout, v.places && c.places, v.launches};
  }
  std::vector<Outputs> results(const Variation& v) {
    std::vector<Outputs> got;
    for (const Asked& a : asked_) got.push_back(templates_testing::poisoned_outputs(a.what.problem, a.in));
    Backend::run(ranks_, 10s, [&](typename Backend::comm_type& world) {
      for (std::size_t i = 0; i < asked_.size(); ++i) {
        const auto executor = [&](int rank, const Streams<cudaStream_t>& s) {
          const cudaStream_t late[] = {s.compute, s.comm, nullptr};
          return v.has_delays ? DelayingExecutor(std::random_device{}() + static_cast<unsigned>(rank), late[i % 3])
                              : DelayingExecutor();
        };
        templates_testing::run_ring<Backend, T>(world, asked_[i].what.problem, asked_[i].in, v.transport, v.calls,
                                                executor, got[i], how(i, v));
      }
    });
    return got;
  }
  double error(std::size_t i, const Outputs& got) {
    Asked& a = asked_[i];
    const Problem& p = a.what.problem;
    const bool is_alone = ranks_ == 1 && a.alone.empty();
    double worst = 0;
    std::size_t number = 0;
    for (const ring_testing::Member& m : ring_testing::members(p)) {
      if (m.values == &Outputs::lse) {
        check_lse(a, got.lse);
        continue;
      }
      const double error = oracle::relative_l2(got.*m.values, a.exact.*m.values);
      const double most = (std::is_same_v<T, bfloat16> ? 8e-3 : 1e-3) * (a.what.spread > 1 ? 4 : 1);
      if (!(error <= most)) fail("%s: %s is off by %.2e", a.what.name, m.name, error);
      if (is_alone) a.alone.push_back(error);
      const double of_one = a.alone[number++];
      if (!a.what.is_large) continue;
      const double ratio = error / of_one;
      if (!(ratio <= 1.05)) fail("%s: the error of %s is %.3f times that of one rank", a.what.name, m.name, ratio);
      worst = std::max(worst, ratio);
    }
    return worst;
  }
  void check_lse(const Asked& a, const std::vector<double>& got) {
    const std::vector<double>& want = a.exact.lse;
    for (std::size_t i = 0; i < want.size(); ++i) {
      if (got[i] == want[i] || std::abs(got[i] - want[i]) < 1e-5 * std::max(1.0, std::abs(want[i]))) continue;
      return fail("%s: lse [%zu] is %.9g, not %.9g", a.what.name, i, got[i], want[i]);
    }
  }

  std::vector<Asked>& asked_;
  std::vector<Outputs> first_;
  int ranks_, runs_ = 0, failures_ = 0;
  double worst_at_once_ = 0;
};

/// Whether all was right. `only_errors`: nothing but the errors of one rank is asked for.
template <class Backend, class T>
bool check(const char* where, std::vector<Asked>& asked, int ranks, bool only_errors = false) {
  const testing_support::Watchdog watchdog(where, 120s);
  const auto start = std::chrono::steady_clock::now();
  Checks<Backend, T> checks(asked, ranks);
  std::string failure;
  double worst = 0;
  try {
    worst = checks.run_once();
    if (!only_errors) checks.run_variations();
    if (!only_errors && ranks > 1) checks.run_launches();
  } catch (const std::exception& e) {
    failure = e.what();
  }
  const bool good = failure.empty() && checks.failures() == 0;
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  if (good && only_errors) return true;
  std::printf(
      "%-6s %-12s %-4s %d ranks: error %.3f of one rank's, at once %.3f; %d runs of equal bits, %d failures; "
      "%.1f s %s\n",
      good ? "ok" : "FAILED", where, name_of(dtype_of<T>), ranks, worst, checks.worst_at_once(), checks.runs(),
      checks.failures(), took.count(), failure.c_str());
  return good;
}

/// `only_ranks`: 0 for all numbers of ranks.
template <class T>
int check_all(int devices, int only_ranks) {
  std::vector<Asked> asked;
  for (const Case& c : cases()) {
    const auto rounded = [](double value) {
      return static_cast<double>(static_cast<float>(T(static_cast<float>(value))));
    };
    Inputs in = oracle::draw(c.problem, std::random_device{}(), rounded);
    for (double& value : in.q) value = rounded(c.spread * value);
    Outputs exact = oracle::solve(c.problem, in);
    asked.push_back({c, std::move(in), std::move(exact)});
  }
  using OneGpu = conformance::CudaThreads<1>;
  if (only_ranks > 1 && !check<OneGpu, T>("one GPU", asked, 1, true)) return 1;
  int failed = 0;
  for (const int ranks : {1, 2, 3, 4, 5, 8}) {
    if (only_ranks == 0 || ranks == only_ranks) failed += !check<OneGpu, T>("one GPU", asked, ranks);
  }
  if (devices < 2) {
    std::printf("skipped: ranks on all GPUs, 2 are needed\n");
  } else {
    for (const int ranks : {2, 4}) {
      if (only_ranks == 0 || ranks == only_ranks)
        failed += !check<conformance::CudaThreads<0>, T>("all GPUs", asked, ranks);
    }
  }
  return failed;
}

}  // namespace

int main(int argc, char** argv) {
  if (gpu_testing::lacks_gpus(1)) return gpu_testing::skipped;
  const int devices = cuda_device_count();
  const int ranks = argc > 1 ? std::atoi(argv[1]) : 0;
  const std::string dtype = argc > 2 ? argv[2] : "";
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  int failed = 0;
  if (dtype != "f16") failed += check_all<bfloat16>(devices, ranks);
  if (dtype != "bf16") failed += check_all<float16>(devices, ranks);
  std::printf(failed == 0 ? "all passed\n" : "%d FAILED\n", failed);
  return failed == 0 ? 0 : 1;
}
