// Rings in which latents travel (MLA), and relayouts, on ranks that share one GPU: against float64 on one rank, with
// the same bits by both transports. Argument: a number of ranks, which alone is then run. Exit code 77 without a GPU.
#define DOCTEST_CONFIG_DISABLE  // the backends of the conformance suites serve here without the suites
#include <cstdio>

#include <pleat/attention/cuda/cuda_attention.cuh>
#include <pleat/attention/relayout.hpp>
#include <pleat/cuda/leaf.cuh>

#include <conformance/cuda_threads.hpp>
#include <support/watchdog.hpp>

#include "delays.cuh"
#include "latent_calls.cuh"
#include "skip.hpp"

template <>
struct pleat::attention_leaf<pleat::cuda_device>
    : pleat::CudaAttention<pleat::TypeList<pleat::bfloat16>, pleat::HeadDimsList<pleat::HeadDims<192, 128>>> {};

namespace {

using namespace pleat;
using namespace std::chrono_literals;
using conformance::require;
using latents::LatentInputs;
using latents::LatentOutputs;
using latents::Widths;
using oracle::Problem;
using ring::Layout;
using templates_testing::DelayingExecutor;
using OneGpu = conformance::CudaThreads<1>;

struct Case {
  const char* name;
  Problem problem;
  std::optional<Layout> layout{};
};
std::vector<Case> cases() {
  const auto packed = [](std::vector<std::int64_t> lengths) {
    Problem p{.q_heads = 2, .kv_heads = 2, .cu_seqlens = {0}};
    for (const std::int64_t length : lengths) p.cu_seqlens.push_back(p.cu_seqlens.back() + length);
    p.tokens = p.cu_seqlens.back() + 3;
    return p;
  };
  return {{"causal, batch", {.batch = 2, .tokens = 240, .q_heads = 2, .kv_heads = 2}},
          {"full, odd length", {.tokens = 131, .q_heads = 2, .kv_heads = 2, .causal = false}},
          {"documents, zigzag", packed({70, 1, 0, 40}), Layout::zigzag},
          {"documents, balanced", packed({70, 1, 0, 40}), Layout::balanced}};
}
using MemberValues = std::vector<double> LatentOutputs::*;  // see ring_bits.cuh
constexpr struct {
  const char* name;
  MemberValues values;
} members[] = {{"out", &LatentOutputs::out},
               {"dq", &LatentOutputs::dq},
               {"dlatent", &LatentOutputs::dlatent},
               {"dweights", &LatentOutputs::dweights}};

LatentOutputs run(const Widths& w, const Case& c, const LatentInputs& in, int ranks, Transport transport, int calls,
                  bool has_delays) {
  LatentOutputs all = latent_testing::poisoned_outputs(in);
  std::vector<std::vector<float>> weights(static_cast<std::size_t>(ranks));
  OneGpu::run(ranks, 20s, [&](CudaThreadComm& world) {
    const auto executor = [&](int rank, const Streams<cudaStream_t>&) {
      return has_delays ? DelayingExecutor(std::random_device{}() + static_cast<unsigned>(rank), nullptr)
                        : DelayingExecutor();
    };
    latent_testing::run_latents<OneGpu, bfloat16>(world, w, c.problem, in, transport, c.layout, calls, executor, all,
                                                  weights[static_cast<std::size_t>(world.rank())]);
  });
  for (const auto& part : weights) {
    for (std::size_t i = 0; i < part.size(); ++i) all.dweights[i] += static_cast<double>(part[i]);
  }
  return all;
}

/// Returns how many failed.
int check_latents(int ranks) {
  const Widths w{.lora = 24, .rope = 64, .nope = 128, .v_dim = 128};
  int failed = 0;
  for (Case c : cases()) {
    const testing_support::Watchdog watchdog(c.name, 60s);
    c.problem = latents::problem_of(w, c.problem);
    std::string wrong;
    double errors[std::size(members)] = {};
    try {
      const LatentInputs in = latents::draw<bfloat16>(w, c.problem, std::random_device{}());
      const LatentOutputs want = latents::solve(w, c.problem, in);
      const LatentOutputs hops = run(w, c, in, ranks, Transport::collective, 1, false);
      const LatentOutputs pushes = run(w, c, in, ranks, Transport::peer, 3, true);
      for (std::size_t m = 0; m < std::size(members); ++m) {
        const auto values = members[m].values;
        errors[m] = oracle::relative_l2(hops.*values, want.*values);
        if (!(errors[m] <= 2e-2)) wrong += std::string(" ") + members[m].name + " is off;";
        for (std::size_t i = 0; i < (hops.*values).size(); ++i) {
          if ((hops.*values)[i] == (pushes.*values)[i]) continue;
          wrong += std::string(" ") + members[m].name + " [" + std::to_string(i) +
                   "]: " + std::to_string((hops.*values)[i]) + " by exchanges, " + std::to_string((pushes.*values)[i]) +
                   " by copies;";
          break;
        }
      }
    } catch (const std::exception& e) {
      wrong = e.what();
    }
    failed += !wrong.empty();
    std::printf("%-6s latents, %-20s %d ranks: out %.1e dq %.1e dlatent %.1e dweights %.1e %s\n",
                wrong.empty() ? "ok" : "FAILED", c.name, ranks, errors[0], errors[1], errors[2], errors[3],
                wrong.c_str());
  }
  return failed;
}

/// [batch, tokens, 3, 2] of numbers that say where they belong, from one split to another and back.
int check_relayout(int ranks) {
  constexpr std::int64_t batch = 2, row_elems = 6;
  const std::vector<std::int64_t> cu_seqlens{0, 100, 100, 107, 190};
  int failed = 0;
  for (const std::int64_t tokens : {std::int64_t{3}, std::int64_t{197}}) {
    const Layout layouts[] = {Layout::zigzag, Layout::contiguous, Layout::balanced};
    const std::vector<std::int64_t> documents = tokens < 190 ? std::vector{std::int64_t{0}, tokens} : cu_seqlens;
    for (const Layout from : layouts) {
      for (const Layout to : layouts) {
        const relayout::Plan plan = relayout::plan(ring::layout_spans(from, tokens, ranks, documents, true),
                                                   ring::layout_spans(to, tokens, ranks, documents, true),
                                                   {.batch = batch, .row_elems = row_elems, .dtype = DType::f32});
        std::string wrong;
        try {
          OneGpu::run(ranks, 20s, [&](CudaThreadComm& world) {
            const auto self = static_cast<std::size_t>(world.rank());
            const CudaStream s;
            using Rows = templates_testing::RankRows<OneGpu::Buffer, float>;
            const TokenSpans &before = plan.from[self], &after = plan.to[self];
            Rows in(batch * before.tokens(), row_elems + 1), moved(batch * after.tokens(), row_elems),
                back(batch * before.tokens(), row_elems + 2);
            const auto each = [&](Rows& rows, const TokenSpans& spans, std::int64_t pitch, auto f) {
              for (std::int64_t row = 0; row < batch * spans.tokens(); ++row) {
                const std::int64_t token = spans.position(row % spans.tokens()), entry = row / spans.tokens();
                for (std::int64_t i = 0; i < pitch; ++i) {
                  const auto* const at = reinterpret_cast<const float*>(rows.data()) + row * pitch + i;
                  f(rows.host(at), i, static_cast<float>((entry * 1000 + token) * 10 + i));
                }
              }
            };
            const auto expect = [&](float x, std::int64_t i, float value) {
              require(i < row_elems ? x == value : std::isnan(x), "rank ", world.rank(), " has ", static_cast<int>(x),
                      " in place of ", static_cast<int>(value));
            };
            each(in, before, row_elems + 1, [&](float& x, std::int64_t i, float v) { x = i < row_elems ? v : x; });
            in.upload();
            const OneGpu::Buffer scratch(std::max<std::size_t>(1, plan.footprint().scratch));
            auto op = relayout::bind(plan, CudaExecutor(), GroupComm<CudaThreadComm>(world), scratch.block());
            const auto view = [&](const Rows& rows, const TokenSpans& spans) {
              return rows.view(batch, spans.tokens(), 0, 3, 2, DeviceKind::cuda);
            };
            for (int call = 0; call < 2; ++call) {
              op.forward(s, view(in, before), view(moved, after));
              op.backward(s, view(moved, after), view(back, before));
            }
            world.wait(s);
            world.barrier(s);
            world.wait(s);
            moved.download();
            back.download();
            each(moved, after, row_elems, expect);
            each(back, before, row_elems + 2, expect);
          });
        } catch (const std::exception& e) {
          wrong = e.what();
        }
        failed += !wrong.empty();
        if (!wrong.empty()) {
          std::printf("FAILED relayout of %d tokens from %s to %s, %d ranks: %s\n", static_cast<int>(tokens),
                      name_of(from), name_of(to), ranks, wrong.c_str());
        }
      }
    }
  }
  std::printf("%-6s relayout, 18 ways, %d ranks\n", failed == 0 ? "ok" : "FAILED", ranks);
  return failed;
}

}  // namespace

int main(int argc, char** argv) {
  if (gpu_testing::lacks_gpus(1)) return gpu_testing::skipped;
  const int only = argc > 1 ? std::atoi(argv[1]) : 0;
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  int failed = 0;
  for (const int ranks : {1, 2, 3, 4, 5, 8}) {
    if (only == 0 || ranks == only) failed += check_relayout(ranks) + check_latents(ranks);
  }
  std::printf(failed == 0 ? "all passed\n" : "%d FAILED\n", failed);
  return failed == 0 ? 0 : 1;
}
