// Small rings many times: equal bits by every transport and any number of thread blocks, while streams are late and
// other kernels take multiprocessors away, a launch per step or forward in one; and rings captured in CUDA graphs.
// Arguments: a number of ranks, which alone is then run, and a number of calls. Exit code 77 without a GPU.
#define DOCTEST_CONFIG_DISABLE  // the backends of the conformance suites serve here without the suites
#include <array>
#include <cstdio>
#include <deque>

#include <pleat/attention/cuda/cuda_attention.cuh>
#include <pleat/cuda/leaf.cuh>

#include <conformance/cuda_threads.hpp>
#include <support/copy_now.hpp>
#include <support/repeats.hpp>
#include <support/watchdog.hpp>

#include "delays.cuh"
#include "ring_calls.hpp"
#include "skip.hpp"
#include "two_gpus.cuh"

template <>
struct pleat::attention_leaf<pleat::cuda_device>
    : pleat::CudaAttention<pleat::TypeList<pleat::bfloat16>, pleat::HeadDimsList<pleat::HeadDims<64, 64>>> {};

namespace {

using namespace pleat;
using namespace std::chrono_literals;
using conformance::require;
using oracle::Problem;
using ring::Launches;
using ring::Layout;
using templates_testing::DelayingExecutor;
using OneGpu = conformance::CudaThreads<1>;
using AllGpus = conformance::CudaThreads<0>;

struct Case {
  const char* name;
  Problem problem;
  std::optional<Layout> layout{};
};
std::vector<Case> cases() {
  Problem packed{.tokens = 101, .q_heads = 4, .kv_heads = 2, .qk_dim = 64, .v_dim = 64};
  packed.cu_seqlens = {0, 9, 16, 16, 56, 64, 76, 97};
  return {{"causal", {.tokens = 240, .q_heads = 4, .kv_heads = 2, .qk_dim = 64, .v_dim = 64}},
          {"documents", packed, Layout::balanced}};
}
ring::Plan plan_of(const Case& c, int ranks, Transport transport, Launches launches, int max_ctas = 0) {
  return templates_testing::ring_plan(c.problem, ranks, DType::bf16, transport, {max_ctas, c.layout, false, launches});
}

/// What a comparison has found: how many 32-bit words differ, and in the first call that had one the lowest of these.
struct Found {
  unsigned words = 0, first = ~0u;
  int call = -1;
};
__global__ void compare(const unsigned* want, const unsigned* got, unsigned words, int call, Found* found) {
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < words; i += gridDim.x * blockDim.x) {
    if (want[i] == got[i]) continue;
    atomicAdd(&found->words, 1);
    const int before = atomicCAS(&found->call, -1, call);
    if (before == -1 || before == call) atomicMin(&found->first, i);
  }
}

/// A rank's tensors in one buffer: q, k, v, dout as inputs; out, dq, dk, dv, lse as results.
class Tensors {
 public:
  static constexpr const char* names[] = {"out", "dq", "dk", "dv", "lse"};

  Tensors(const Problem& p, std::int64_t tokens, std::size_t lse_bytes) : p_(p), tokens_(tokens) {
    const auto place = [&](int heads, int dim, std::size_t& bytes) {
      const std::size_t at = bytes;
      bytes += (static_cast<std::size_t>(p.batch * tokens * heads * dim) * sizeof(bfloat16) + 127) / 128 * 128;
      return at;
    };
    q_ = place(p.q_heads, p.qk_dim, inputs_bytes_);
    k_ = place(p.kv_heads, p.qk_dim, inputs_bytes_);
    v_ = place(p.kv_heads, p.v_dim, inputs_bytes_);
    dout_ = place(p.q_heads, p.v_dim, inputs_bytes_);
    starts_ = {0};
    for (const auto& [heads, dim] :
         {std::pair{p.q_heads, p.v_dim}, {p.q_heads, p.qk_dim}, {p.kv_heads, p.qk_dim}, {p.kv_heads, p.v_dim}}) {
      place(heads, dim, results_bytes_);
      starts_.push_back(results_bytes_);
    }
    lse_bytes_ = lse_bytes;
    results_bytes_ += lse_bytes;
    starts_.push_back(results_bytes_);
    inputs_.emplace(std::max<std::size_t>(128, inputs_bytes_));
    results_.emplace(std::max<std::size_t>(128, results_bytes_));
  }

  /// Normal numbers.
  void draw(unsigned seed) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal;
    std::vector<bfloat16> values(inputs_->block().size_bytes / sizeof(bfloat16));
    for (bfloat16& value : values) value = static_cast<bfloat16>(normal(generator));
    inputs_->upload(reinterpret_cast<const std::byte*>(values.data()));
  }
  void poison(cudaStream_t s) const {
    check_cuda(cudaMemsetAsync(results(), 0xff, results_bytes_, s), "cudaMemsetAsync");
  }
  template <class Op, class... Work>
  void call(Op& op, const Streams<cudaStream_t>& s, const Work&... work) const {
    ring::Saved saved(Block{results() + starts_[4], lse_bytes_});
    op.forward(s, work..., view(inputs(), q_, p_.q_heads, p_.qk_dim), view(inputs(), k_, p_.kv_heads, p_.qk_dim),
               view(inputs(), v_, p_.kv_heads, p_.v_dim), view(results(), starts_[0], p_.q_heads, p_.v_dim), saved);
    op.backward(s, view(inputs(), dout_, p_.q_heads, p_.v_dim), saved,
                view(results(), starts_[1], p_.q_heads, p_.qk_dim), view(results(), starts_[2], p_.kv_heads, p_.qk_dim),
                view(results(), starts_[3], p_.kv_heads, p_.v_dim));
  }
  std::byte* results() const { return results_->block().data; }
  std::size_t results_bytes() const { return results_bytes_; }
  /// Where result `number` begins.
  std::size_t start(std::size_t number) const { return starts_[number]; }

 private:
  std::byte* inputs() const { return inputs_->block().data; }
  TensorRef view(std::byte* data, std::size_t at, int heads, int dim) const {
    return TensorRef(data + at, DType::bf16, {p_.batch, tokens_, heads, dim}, {DeviceKind::cuda, 0});
  }

  Problem p_;
  std::int64_t tokens_;
  std::size_t q_, k_, v_, dout_, lse_bytes_, inputs_bytes_ = 0, results_bytes_ = 0;
  std::vector<std::size_t> starts_;  // of results
  std::optional<OneGpu::Buffer> inputs_, results_;
};

/// A rank's operation with memory of its own, but for the arena.
template <class Arena>
struct Bound {
  using Op = ring::RingAttention<DelayingExecutor, CudaThreadComm, Arena>;
  Bound(const ring::Plan& plan, const DelayingExecutor& executor, const GroupComm<CudaThreadComm>& group, Arena* arena,
        cudaStream_t s)
      : scratch(std::max<std::size_t>(128, plan.footprint().scratch)),
        persistent(std::max<std::size_t>(128, plan.footprint().persistent)),
        staging(std::max<std::size_t>(128, plan.footprint().pinned_host)),
        op(ring::bind(plan, executor, group, Memory<Arena>{scratch.block(), persistent.block(), staging.block(), arena},
                      s)) {}
  OneGpu::Buffer scratch, persistent;
  PinnedBuffer staging;
  Op op;
};

/// Threads on devices that map each other already.
class PairLink final : public two_gpus::Link {
 public:
  explicit PairLink(two_gpus::ThreadPair& pair) : pair_(pair) {}
  void meet() override { pair_.barrier.arrive_and_wait(); }
  std::byte* map_peer(int rank, std::byte* mine) override {
    pair_.blocks[rank] = mine;
    meet();
    return pair_.blocks[1 - rank];
  }

 private:
  two_gpus::ThreadPair& pair_;
};
/// Mapped memory of two ranks, with a GPU each or sharing one: what may be captured, and what kernels wait for.
struct PairArena {
  two_gpus::Rank* rank;
  bool reachable(const Group& group) const { return group.size() == two_gpus::ranks; }
  MappedPeers open(const Group&, std::size_t bytes, int channels) {
    return rank->open((bytes + 127) / 128 * 128, channels);
  }
};
static_assert(symmetric_arena<PairArena>);

/// Returns a text, empty when all calls have the bits of the first. Two ranks with a GPU each also have flags in mapped
/// memory.
template <class Backend>
std::string check_repeats(const Case& c, int ranks, Launches launches, int calls) {
  const bool maps = std::is_same_v<Backend, AllGpus> && ranks == two_gpus::ranks;
  std::vector<ring::Plan> plans;
  std::size_t symmetric = 0;
  for (const Transport transport : {Transport::collective, Transport::peer}) {
    if (launches == Launches::one && transport == Transport::collective) continue;
    for (const int max_ctas : {0, 1, 5}) {
      plans.push_back(plan_of(c, ranks, transport, launches, max_ctas));
      symmetric += plans.back().footprint().symmetric + 128;
    }
  }
  two_gpus::ThreadPair pair;
  PairLink link(pair);
  const unsigned seed = std::random_device{}();
  std::vector<std::string> wrong(static_cast<std::size_t>(ranks));
  Backend::run(ranks, 30s, [&](CudaThreadComm& world) {
    const GroupComm<CudaThreadComm> group(world);
    const CudaStream compute, comm, noise;
    const Streams<cudaStream_t> s{compute, comm};
    const DelayingExecutor executor(std::random_device{}(), nullptr);
    Tensors tensors(c.problem, plans[0].local_tokens(world.rank()), plans[0].footprint().saved);
    tensors.draw(seed + static_cast<unsigned>(world.rank()));
    constexpr std::size_t results = std::size(Tensors::names);
    const OneGpu::Buffer first(tensors.results_bytes()), found_memory(results * sizeof(Found));
    Found* const found = reinterpret_cast<Found*>(found_memory.block().data);
    std::vector<Found> none(results);
    testing_support::copy_now(found, none.data(), results * sizeof(Found));
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");  // a copy from pageable memory may end later
    CudaThreadArena arena(group, symmetric);
    std::deque<Bound<CudaThreadArena>> ops;
    for (const ring::Plan& plan : plans) ops.emplace_back(plan, executor, group, &arena, s.compute);
    std::optional<two_gpus::Rank> mapped;
    if (maps) mapped.emplace(link, world.rank());
    PairArena pair_arena{mapped ? &*mapped : nullptr};
    std::deque<Bound<PairArena>> mapped_ops;
    for (const ring::Plan& plan : plans) {
      if (maps && plan.transport == Transport::peer) {
        mapped_ops.emplace_back(plan, executor, group, &pair_arena, s.compute);
      }
    }
    std::mt19937 same(seed), own(std::random_device{}());
    for (int call = 0; call < calls; ++call) {
      templates_testing::spin<<<1 + own() % 200, 64, 0, noise>>>(own() % 200'000);
      tensors.poison(s.compute);
      const std::size_t by = call == 0 ? 0 : same() % (ops.size() + mapped_ops.size());
      if (by < ops.size()) {
        tensors.call(ops[by].op, s);
      } else {
        tensors.call(mapped_ops[by - ops.size()].op, s);
      }
      if (call == 0) {
        executor.copy(first.block().data, tensors.results(), tensors.results_bytes(), s.compute);
      } else {
        for (std::size_t i = 0; i < results; ++i) {
          const std::size_t begin = tensors.start(i), bytes = tensors.start(i + 1) - begin;
          if (bytes == 0) continue;
          compare<<<32, 256, 0, s.compute>>>(reinterpret_cast<const unsigned*>(first.block().data + begin),
                                             reinterpret_cast<const unsigned*>(tensors.results() + begin),
                                             static_cast<unsigned>(bytes / 4), call, found + i);
          check_launch("compare");
        }
      }
      if (call % 64 == 63) world.wait(s.compute);
    }
    world.wait(s.compute);
    world.barrier(s.compute);  // nobody takes its window away from a peer
    world.wait(s.compute);
    world.wait(noise);
    testing_support::copy_now(none.data(), found, results * sizeof(Found));
    for (std::size_t i = 0; i < results; ++i) {
      if (none[i].words == 0) continue;
      wrong[static_cast<std::size_t>(world.rank())] +=
          " rank " + std::to_string(world.rank()) + " " + Tensors::names[i] + ": " + std::to_string(none[i].words) +
          " words, first in call " + std::to_string(none[i].call) + " word " + std::to_string(none[i].first) + ";";
    }
  });
  std::string all;
  for (const std::string& text : wrong) all += text;
  return all;
}

/// Replays on new inputs have the bits of calls on them, in any order. Documents are placed by the graph too.
std::string check_graph(const Case& c, int ranks, Launches launches) {
  const ring::Plan plan = plan_of(c, ranks, Transport::peer, launches);
  two_gpus::ThreadPair pair;
  PairLink link(pair);
  std::vector<std::string> wrong(static_cast<std::size_t>(ranks));
  AllGpus::run(ranks, 20s, [&](CudaThreadComm& world) {
    const GroupComm<CudaThreadComm> group(world);
    std::optional<two_gpus::Rank> rank;
    if (ranks == 2) rank.emplace(link, world.rank());
    PairArena arena{rank ? &*rank : nullptr};
    const CudaStream compute, comm;
    const Streams<cudaStream_t> s{compute, comm};
    Tensors tensors(c.problem, plan.local_tokens(world.rank()), plan.footprint().saved);
    const OneGpu::Buffer placed(std::max<std::size_t>(128, plan.work.placed_bytes()));
    const PinnedBuffer staging(std::max<std::size_t>(128, plan.work.placed_bytes()));
    Bound<PairArena> bound(plan, DelayingExecutor(), group, &arena, s.compute);
    const auto wait = [&] { rank ? rank->wait(s.compute) : world.wait(s.compute); };
    const auto meet = [&] {  // all ranks' streams are idle: what follows may allocate, copy and free
      wait();
      world.barrier(s.compute);
      world.wait(s.compute);
    };
    const auto call = [&] {
      tensors.poison(s.compute);
      tensors.call(bound.op, s, bound.op.place(plan.work, staging.block(), placed.block(), s.compute));
    };
    std::vector<std::byte> by_call(tensors.results_bytes()), by_graph(by_call);
    const auto download = [&](std::vector<std::byte>& to) {
      testing_support::copy_now(to.data(), tensors.results(), to.size());
    };
    tensors.draw(7);
    meet();
    call();
    meet();
    const two_gpus::Graph graph(s.compute, call);
    for (unsigned i = 0; i < 6; ++i) {
      meet();
      tensors.draw(std::random_device{}());
      meet();
      for (unsigned replay = 0; replay <= i % 3; ++replay) graph.launch(s.compute);
      meet();
      download(by_graph);
      meet();
      call();
      meet();
      download(by_call);
      for (std::size_t r = 0; r < std::size(Tensors::names); ++r) {
        const std::size_t begin = tensors.start(r), bytes = tensors.start(r + 1) - begin;
        if (std::memcmp(by_call.data() + begin, by_graph.data() + begin, bytes) == 0) continue;
        wrong[static_cast<std::size_t>(world.rank())] += " rank " + std::to_string(world.rank()) + " replay " +
                                                         std::to_string(i) + ": other bits of " + Tensors::names[r];
      }
    }
    meet();
  });
  std::string all;
  for (const std::string& text : wrong) all += text;
  return all;
}

template <class Check>
bool fails(const char* what, const char* name, int ranks, Check check) {
  const testing_support::Watchdog watchdog(std::string(what) + ", " + name, 60s);
  const auto start = std::chrono::steady_clock::now();
  std::string wrong;
  try {
    wrong = check();
  } catch (const std::exception& e) {
    wrong = e.what();
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  std::printf("%-6s %-23s %-10s %d ranks %5.1f s %s\n", wrong.empty() ? "ok" : "FAILED", what, name, ranks,
              took.count(), wrong.c_str());
  return !wrong.empty();
}

}  // namespace

int main(int argc, char** argv) {
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);  // a stream that waits for a peer has a queue for itself
  if (gpu_testing::lacks_gpus(1)) return gpu_testing::skipped;
  const int only = argc > 1 ? std::atoi(argv[1]) : 0;
  const int calls = argc > 2 ? std::atoi(argv[2]) : testing_support::repeats(1000);
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const int devices = cuda_device_count();
  if (devices < 2) std::printf("skipped: calls on all GPUs, 2 are needed\n");
  int failed = 0;
  for (const Launches launches : {Launches::per_step, Launches::one}) {
    std::printf("%s\n", name_of(launches));
    for (const Case& c : cases()) {
      for (const int ranks : {2, 3, 8}) {
        if (only != 0 && ranks != only) continue;
        failed += fails(std::to_string(calls).append(" calls").c_str(), c.name, ranks,
                        [&] { return check_repeats<OneGpu>(c, ranks, launches, calls); });
        if (devices < 2) continue;
        failed += fails(std::to_string(calls).append(" calls on all GPUs").c_str(), c.name, ranks,
                        [&] { return check_repeats<AllGpus>(c, ranks, launches, calls); });
      }
      for (const int ranks : {1, 2}) {
        if (only != 0 && ranks != only) continue;
        failed += fails("graph", c.name, ranks, [&] { return check_graph(c, ranks, launches); });
      }
    }
  }
  std::printf(failed == 0 ? "all passed\n" : "%d FAILED\n", failed);
  return failed == 0 ? 0 : 1;
}
