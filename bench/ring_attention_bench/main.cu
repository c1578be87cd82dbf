// ring_attention_bench: ring attention on several GPUs, by copies into mapped memory and by NCCL, beside the same
// rectangles with nothing transferred and one GPU with as many operations of one sequence of its own. TFLOP/s per GPU
// count the pairs that are seen. Both ways must give the same bits. Packed documents, of lengths drawn by the seed,
// stand beside one document of as many operations.
//
//   ring_attention_bench [--ranks <number>] [--quick] [--mode threads|processes] [--json <file>] [--check] [--seed
//   <number>] [--rows <some of: local,16k,packed,32k,64k,128k,latents and names of heads as printed>]
//
// Exit code 77 where there are fewer GPUs than ranks (two); 1 when bits differ or time is up; 3 with --check when a bar
// is missed. The same rows of PyTorch: peers/context_parallel.py.
#include <deque>
#include <functional>
#include <numeric>
#include <optional>
#include <random>

#include <pleat/attention/cuda/cuda_attention.cuh>
#include <pleat/attention/ring.hpp>
#include <pleat/cuda/leaf.cuh>

#include "../comm_bench/report.hpp"
#include "../comm_bench/site.cuh"
#include "../gpu_ranks.hpp"
#include "latents.cuh"
#include "local.cuh"
#include "no_transfers.hpp"

template <>
struct pleat::attention_leaf<pleat::cuda_device>
    : pleat::CudaAttention<pleat::TypeList<pleat::bfloat16>,
                           pleat::HeadDimsList<pleat::HeadDims<64, 64>, pleat::HeadDims<128, 128>,
                                               pleat::HeadDims<192, 128>, pleat::HeadDims<256, 256>>> {};

namespace ring_attention_bench {

using pleat::bfloat16;

PLEAT_KERNEL void fill_normal(bfloat16* to, std::size_t elems, unsigned seed) {
  for (std::size_t i = blockIdx.x * static_cast<std::size_t>(blockDim.x) + threadIdx.x; i < elems;
       i += static_cast<std::size_t>(gridDim.x) * blockDim.x) {
    std::uint64_t x = (i + 1) * 0x9e3779b97f4a7c15u + seed;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    const float radius = static_cast<float>((x >> 40) + 1) * 0x1p-24f,
                angle = static_cast<float>(x & 0xffffff) * 0x1p-23f;
    to[i] = bfloat16(sqrtf(-2 * logf(radius)) * cospif(angle));
  }
}

/// Adds to `sums` the squares of a - b, and those of b.
PLEAT_KERNEL void add_squares(const bfloat16* a, const bfloat16* b, std::size_t elems, double* sums) {
  double difference = 0, size = 0;
  for (std::size_t i = blockIdx.x * static_cast<std::size_t>(blockDim.x) + threadIdx.x; i < elems;
       i += static_cast<std::size_t>(gridDim.x) * blockDim.x) {
    const double x = static_cast<float>(a[i]), y = static_cast<float>(b[i]);
    difference += (x - y) * (x - y);
    size += y * y;
  }
  atomicAdd(sums, difference);
  atomicAdd(sums + 1, size);
}

}  // namespace ring_attention_bench

namespace {

using namespace pleat;
using comm_bench::Report;
using comm_bench::Site;

struct Heads {
  const char* name;
  int q, kv, qk_dim, v_dim;
};
/// TFLOP/s per GPU, of a row or that one has to reach; 0: none.
struct Rates {
  double forward = 0, backward = 0, at_once = 0;
};
/// What is attended over. Empty boundaries: one document.
struct Stream {
  std::string name;
  std::int64_t tokens;
  std::vector<std::int64_t> cu_seqlens{};
  std::optional<ring::Layout> layout{};
};
Stream one_document(std::int64_t tokens) {
  return {std::to_string(tokens / 1024) + "k", tokens};
}
/// Boundaries of documents of log-normal lengths that fill the stream.
std::vector<std::int64_t> log_normal(std::int64_t tokens, double mean, double sigma, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<double> normal(std::log(mean) - sigma * sigma / 2, sigma);
  std::vector<std::int64_t> cu_seqlens{0};
  while (cu_seqlens.back() < tokens) {
    cu_seqlens.push_back(
        std::min(tokens, cu_seqlens.back() + 1 + static_cast<std::int64_t>(std::exp(normal(generator)))));
  }
  return cu_seqlens;
}

class Rank {
 public:
  Rank(NcclComm& world, Report& report, std::size_t window_bytes)
      : site_(world, comm_bench::mib, window_bytes), report_(report) {}

  /// `ctas_beside_nccl`: also with so many CTAs, which leaves multiprocessors to NCCL; 0: without. Returns the rates by
  /// copies.
  Rates run(const Heads& heads, const Stream& stream, const Rates& bars, int ctas_beside_nccl = 0) {
    const auto plan_of = [&](Transport transport, ring::Launches launches, int max_ctas = 0) {
      return ring::plan(site_.ranks(),
                        {.tokens = stream.tokens,
                         .q_heads = heads.q,
                         .kv_heads = heads.kv,
                         .qk_dim = heads.qk_dim,
                         .v_dim = heads.v_dim,
                         .dtype = DType::bf16,
                         .cu_seqlens = stream.cu_seqlens},
                        {.transport = transport, .layout = stream.layout, .launches = launches, .max_ctas = max_ctas});
    };
    using ring::Launches;
    const ring::Plan peer = plan_of(Transport::peer, Launches::per_step),
                     collective = plan_of(Transport::collective, Launches::per_step),
                     at_once = plan_of(Transport::peer, Launches::one);
    const std::int64_t local = peer.local_tokens(site_.rank());
    const Tensors t = tensors(heads, local);
    const CudaBuffer scratch(collective.footprint().scratch);
    const Streams<cudaStream_t> s{site_.s, site_.side};

    std::deque<Way> ways;
    ways.emplace_back(peer, site_, scratch.block(), s.compute);
    ways.emplace_back(collective, site_, scratch.block(), s.compute);
    ways.emplace_back(at_once, site_, scratch.block(), s.compute);
    if (ctas_beside_nccl > 0) {
      const ring::Plan beside = plan_of(Transport::collective, Launches::per_step, ctas_beside_nccl);
      ways.emplace_back(beside, site_, scratch.block(), s.compute);
    }
    compare(ways, t, s);

    // The same with nothing transferred.
    const auto other_k = tensor(local * (site_.ranks() - 1), heads.kv, heads.qk_dim),
               other_v = tensor(local * (site_.ranks() - 1), heads.kv, heads.v_dim);
    Carver slots(scratch.block());
    ring_attention_bench::NoTransfers nothing(
        ring::detail::block_of(ring::detail::take_slots(slots, collective).sums[0], collective, local, DType::f32,
                               t.q.ref.device()),
        {other_k.ref, other_v.ref});
    const Alone alone(collective, ways[1], site_.rank(), scratch.block(), s.compute),
        alone_at_once(at_once, ways[2], site_.rank(), scratch.block(), s.compute);

    std::vector<std::function<void()>> forwards, backwards;
    for (Way& way : ways) {
      forwards.emplace_back([&] { way.forward(t, s); });
      if (&way != &ways[2]) backwards.emplace_back([&] { way.backward(t, s); });
    }
    for (const Alone* one : {&alone, &alone_at_once}) {
      forwards.emplace_back([&, one] { one->schedule.forward(nothing, s, one->work, one->tensors(t)); });
    }
    backwards.emplace_back([&] { alone.schedule.backward(nothing, s, alone.work, alone.tensors(t), t.gradients()); });
    // As many operations on one GPU, of a sequence of its own.
    std::optional<OnOneGpu> one;
    if (stream.cu_seqlens.empty()) {
      const double tokens = static_cast<double>(stream.tokens) / std::sqrt(site_.ranks());
      one.emplace(tensors(heads, std::lround(tokens / 128) * 128), s.compute);
      forwards.emplace_back([&] { one->local.forward(s.compute); });
      backwards.emplace_back([&] { one->local.backward(true, s.compute); });
    }
    const std::vector<double> forward = in_turn(forwards), backward = in_turn(backwards);
    const double alone_us = forward[ways.size()], at_once_alone_us = forward[ways.size() + 1],
                 backward_alone_us = backward[ways.size() - 1];

    const std::vector<double> of_ranks = pairs_of_ranks(peer.spans, peer.shape.cu_seqlens, true);
    const double pairs = std::accumulate(of_ranks.begin(), of_ranks.end(), 0.0) * heads.q / site_.ranks();
    const double there = forward_flops(heads, pairs), back = backward_flops(heads, pairs);
    const std::string name = std::string(heads.name) + " " + stream.name;
    const Rates rates{add(name, "forward by copies", there, forward[0], alone_us, bars.forward),
                      add(name, "backward by copies", back, backward[0], backward_alone_us, bars.backward),
                      add(name, "forward at once", there, forward[2], at_once_alone_us, bars.at_once)};
    if (one) {
      report_.line("%43s one GPU with a sequence of %lld: forward %.0f, backward %.0f TFLOP/s", "",
                   static_cast<long long>(one->t.q.ref.extent(1)),
                   forward_flops(heads, one->pairs()) / forward.back() / 1e6,
                   backward_flops(heads, one->pairs()) / backward.back() / 1e6);
    }
    report_.add({name, "forward by NCCL", 0, forward[1], 0, alone_us});
    report_.add({name, "backward by NCCL", 0, backward[1], 0, backward_alone_us});
    if (ctas_beside_nccl > 0) {
      const std::string way = "by NCCL, " + std::to_string(ctas_beside_nccl) + " CTAs";
      report_.add({"  forward", way, 0, forward[3], 0, alone_us});
      report_.add({"  backward", way, 0, backward[2], 0, backward_alone_us});
    }
    if (!stream.cu_seqlens.empty()) {
      report_.line("%43s %zu documents, %s: max/mean work of ranks %.4f (goal 1.02)", "", stream.cu_seqlens.size() - 1,
                   name_of(peer.layout), imbalance(of_ranks));
    }
    return rates;
  }

  /// The local kernel on all GPUs at once, each with a sequence of its own; backward in a fixed order and in any.
  void run_local(const Heads& heads, const Stream& stream, const Rates& bars, double any_order_bar) {
    const OnOneGpu one(tensors(heads, stream.tokens), site_.s);
    const std::vector<double> us =
        in_turn({[&] { one.local.forward(site_.s); }, [&] { one.local.backward(true, site_.s); },
                 [&] { one.local.backward(false, site_.s); }});
    const auto row = [&](const char* way, double flops, double time, double bar) {
      std::vector<comm_bench::Bar> held;
      if (bar > 0) held.push_back({std::to_string(static_cast<int>(bar)) + " TFLOP/s", flops / bar / 1e6});
      report_.add({std::string(heads.name) + " " + stream.name, way, 0, time, 0, 0}, held);
      report_.line("%43s %.0f TFLOP/s", "", flops / time / 1e6);
    };
    row("forward, one GPU", forward_flops(heads, one.pairs()), us[0], bars.forward);
    row("backward, one GPU", backward_flops(heads, one.pairs()), us[1], bars.backward);
    row("  in any order", backward_flops(heads, one.pairs()), us[2], any_order_bar);
  }

  /// Packed documents by each split that suits them, held to 0.8 of the rate of one document that takes as many
  /// operations.
  void run_packed(const Heads& heads, std::int64_t tokens, unsigned seed) {
    const std::vector<std::int64_t> cu_seqlens = log_normal(tokens, 2048, 1, seed);
    const double pairs = visible_pairs({0, tokens}, cu_seqlens, true);
    const auto equal = static_cast<std::int64_t>(std::sqrt(2 * pairs)) / 1024 * 1024;
    const Rates dense = run(heads, one_document(equal), {});
    const Stream packed{"packed " + std::to_string(tokens / 1024) + "k", tokens, cu_seqlens};
    run(heads, packed, {0.8 * dense.forward, 0.8 * dense.backward, 0.8 * std::max(dense.forward, dense.at_once)});
    Stream by_zigzag = packed;
    by_zigzag.layout = ring::Layout::zigzag;
    run(heads, by_zigzag, {});
  }

  /// Where latents of 512 + 64 numbers travel in place of keys and values.
  void run_latents(const Heads& heads, std::int64_t tokens) {
    const auto plan_of = [&](Transport transport) {
      return ring::plan(site_.ranks(),
                        {.tokens = tokens,
                         .q_heads = heads.q,
                         .kv_heads = heads.kv,
                         .qk_dim = heads.qk_dim,
                         .v_dim = heads.v_dim,
                         .latent_dim = 576,
                         .dtype = DType::bf16},
                        {.transport = transport});
    };
    const ring::Plan peer = plan_of(Transport::peer), collective = plan_of(Transport::collective);
    const std::int64_t local = peer.local_tokens(site_.rank());
    const Tensor q = tensor(local, heads.q, heads.qk_dim), latent = tensor(local, 1, 576),
                 dout = tensor(local, heads.q, heads.v_dim), out = tensor(local, heads.q, heads.v_dim),
                 dq = tensor(local, heads.q, heads.qk_dim), dlatent = tensor(local, 1, 576);
    const auto rows = [&](const Tensor& t) {
      return TensorRef(t.ref.data(), DType::bf16, {1, local, 576}, t.ref.device());
    };
    const CudaBuffer scratch(collective.footprint().scratch);
    const Streams<cudaStream_t> s{site_.s, site_.side};
    ring_attention_bench::LatentExpander expander;
    std::deque<Way> ways;
    ways.emplace_back(peer, site_, scratch.block(), s.compute);
    ways.emplace_back(collective, site_, scratch.block(), s.compute);
    std::vector<std::function<void()>> forwards, backwards;
    std::vector<std::vector<std::byte>> first;
    for (Way& way : ways) {
      forwards.emplace_back([&] { way.op.forward_latent(s, expander, q.ref, rows(latent), out.ref, way.saved); });
      backwards.emplace_back([&] { way.op.backward_latent(s, expander, dout.ref, way.saved, dq.ref, rows(dlatent)); });
      forwards.back()();
      backwards.back()();
      site_.world.wait(s.compute);
      std::vector<std::vector<std::byte>> result;
      for (const Tensor* of : {&out, &dq, &dlatent}) result.push_back(of->download());
      if (first.empty()) first = result;
      if (site_.meet(result == first ? 0 : 1) != 0) throw std::runtime_error("other bits of latents by NCCL");
    }
    Carver slots(scratch.block());
    const ring::KeyValueBlock sums = ring::detail::block_of(ring::detail::take_slots(slots, collective).sums[0],
                                                            collective, local, DType::f32, q.ref.device());
    const TensorRef no_values(nullptr, DType::bf16, {1, local, 1, 0}, q.ref.device());
    ring_attention_bench::NoTransfers nothing(sums, {});
    const Alone alone(collective, ways[1], site_.rank(), scratch.block(), s.compute);
    const ring::detail::RingTensors tensors{q.ref, {latent.ref, no_values}, out.ref, alone.lse};
    const ring::detail::RingGradients gradients{dout.ref, dq.ref, {dlatent.ref, no_values}};
    forwards.emplace_back([&] { alone.schedule.forward(nothing, s, alone.work, tensors, expander); });
    backwards.emplace_back([&] { alone.schedule.backward(nothing, s, alone.work, tensors, gradients, expander); });
    const std::vector<double> forward = in_turn(forwards), backward = in_turn(backwards);
    const double pairs = static_cast<double>(tokens) * static_cast<double>(tokens) / 2 * heads.q / site_.ranks();
    const std::string name = std::string(heads.name) + " latents";
    add(name, "forward by copies", forward_flops(heads, pairs), forward[0], forward[2], 0);
    add(name, "backward by copies", backward_flops(heads, pairs), backward[0], backward[2], 0);
    report_.add({name, "forward by NCCL", 0, forward[1], 0, forward[2]});
    report_.add({name, "backward by NCCL", 0, backward[1], 0, backward[2]});
  }

 private:
  static constexpr int samples = 5;

  struct Tensor {
    CudaBuffer memory;
    TensorRef ref;
    std::vector<std::byte> download() const {
      std::vector<std::byte> bytes(memory.size_bytes());
      check_cuda(cudaMemcpy(bytes.data(), memory.data(), bytes.size(), cudaMemcpyDefault), "cudaMemcpy");
      return bytes;
    }
  };
  struct Tensors {
    Tensor q, k, v, dout, out, dq, dk, dv;
    ring::detail::RingGradients gradients() const { return {dout.ref, dq.ref, {dk.ref, dv.ref}}; }
  };
  /// The local kernel and its tensors; forward has run.
  struct OnOneGpu {
    OnOneGpu(Tensors of, cudaStream_t s) : t(std::move(of)), local({t.q.ref, t.k.ref, t.v.ref, t.dout.ref, t.out.ref}) {
      local.forward(s);
      local.delta(s);
    }
    /// Of queries and keys that they see, of all heads.
    double pairs() const {
      const auto tokens = static_cast<double>(t.q.ref.extent(1));
      return tokens * tokens / 2 * static_cast<double>(t.q.ref.extent(2));
    }
    Tensors t;
    ring_attention_bench::Local<attention_leaf<cuda_device>> local;
  };
  /// A plan's operation and its memory.
  struct Way {
    Way(const ring::Plan& plan, Site& site, Block scratch, cudaStream_t s)
        : persistent(plan.footprint().persistent),
          saved_bytes(plan.footprint().saved),
          pinned(plan.footprint().pinned_host),
          op(ring::bind(plan, CudaExecutor{}, GroupComm<NcclComm>(site.world),
                        Memory<NcclArena>{scratch, persistent.block(), pinned.block(), &site.arena}, s)),
          saved(saved_bytes.block()) {}
    void forward(const Tensors& t, const Streams<cudaStream_t>& s) {
      op.forward(s, t.q.ref, t.k.ref, t.v.ref, t.out.ref, saved);
    }
    void backward(const Tensors& t, const Streams<cudaStream_t>& s) {
      op.backward(s, t.dout.ref, saved, t.dq.ref, t.dk.ref, t.dv.ref);
    }
    CudaBuffer persistent, saved_bytes;
    PinnedBuffer pinned;
    ring::RingAttention<CudaExecutor, NcclComm, NcclArena> op;
    ring::Saved saved;
  };
  /// A way's schedule and work, for another transport.
  struct Alone {
    Alone(const ring::Plan& of, Way& way, int rank, Block scratch, cudaStream_t s)
        : plan(std::make_shared<const ring::Plan>(of)),
          work(plan->work, rank, way.pinned.block(), way.persistent.block(), CudaExecutor{}, s),
          schedule(plan, CudaExecutor{}, rank, scratch),
          lse(schedule.statistics(way.saved_bytes.data())) {}
    ring::detail::RingTensors tensors(const Tensors& t) const { return {t.q.ref, {t.k.ref, t.v.ref}, t.out.ref, lse}; }
    std::shared_ptr<const ring::Plan> plan;
    ring::PlacedWork work;
    ring::detail::RingSchedule<CudaExecutor> schedule;
    TensorRef lse;
  };

  /// Times of the slowest rank, us: medians of samples that are taken in turn, so that each meets the same clocks.
  std::vector<double> in_turn(const std::vector<std::function<void()>>& runs) {
    std::vector<std::vector<double>> times(runs.size());
    for (int sample = 0; sample < 1 + samples; ++sample) {
      for (std::size_t i = 0; i < runs.size(); ++i) {
        const double time = 1000 * site_.meet(site_.time_ms(sample, 1, [&](int) { runs[i](); }));
        if (sample >= 1) times[i].push_back(time);
      }
    }
    std::vector<double> medians;
    for (auto& of_run : times) medians.push_back(Site::median(of_run));
    return medians;
  }

  /// All ways must give the bits of the first, but one launch, which may differ by rounding. Errors:
  /// std::runtime_error.
  void compare(std::deque<Way>& ways, const Tensors& t, const Streams<cudaStream_t>& s) {
    std::vector<std::vector<std::byte>> first;
    const CudaBuffer first_out(t.out.memory.size_bytes()), sums(2 * sizeof(double));
    for (Way& way : ways) {
      check_cuda(cudaMemsetAsync(t.out.ref.data(), 0xff, t.out.memory.size_bytes(), s.compute), "cudaMemsetAsync");
      way.forward(t, s);
      way.backward(t, s);
      site_.world.wait(s.compute);
      double error = 0;
      if (way.op.plan().launches == ring::Launches::one) {
        check_cuda(cudaMemsetAsync(sums.data(), 0, sums.size_bytes(), s.compute), "cudaMemsetAsync");
        ring_attention_bench::add_squares<<<1024, 256, 0, s.compute>>>(
            t.out.ref.template as<bfloat16>(), reinterpret_cast<const bfloat16*>(first_out.data()),
            static_cast<std::size_t>(t.out.ref.elems()), reinterpret_cast<double*>(sums.data()));
        check_launch("add_squares");
        double found[2];
        check_cuda(cudaMemcpyAsync(found, sums.data(), sizeof found, cudaMemcpyDefault, s.compute), "cudaMemcpyAsync");
        check_cuda(cudaStreamSynchronize(s.compute), "cudaStreamSynchronize");
        error = std::sqrt(found[0] / found[1]);
      } else {
        std::vector<std::vector<std::byte>> result;
        for (const Tensor* of : {&t.out, &t.dq, &t.dk, &t.dv}) result.push_back(of->download());
        if (first.empty()) {
          check_cuda(cudaMemcpy(first_out.data(), t.out.ref.data(), first_out.size_bytes(), cudaMemcpyDefault),
                     "cudaMemcpy");
          first = std::move(result);
        } else if (result != first) {
          error = 1;
        }
      }
      if (site_.meet(error < 5e-3 ? 0 : 1) != 0) {
        throw std::runtime_error(std::string("other results by ") + name_of(way.op.plan().transport) + ", " +
                                 name_of(way.op.plan().launches));
      }
    }
  }

  static double forward_flops(const Heads& heads, double pairs) { return 2 * pairs * (heads.qk_dim + heads.v_dim); }
  static double backward_flops(const Heads& heads, double pairs) {
    return 2 * pairs * (3 * heads.qk_dim + 2 * heads.v_dim);
  }

  Tensors tensors(const Heads& heads, std::int64_t tokens) {
    return {tensor(tokens, heads.q, heads.qk_dim),  tensor(tokens, heads.kv, heads.qk_dim),
            tensor(tokens, heads.kv, heads.v_dim),  tensor(tokens, heads.q, heads.v_dim),
            tensor(tokens, heads.q, heads.v_dim),   tensor(tokens, heads.q, heads.qk_dim),
            tensor(tokens, heads.kv, heads.qk_dim), tensor(tokens, heads.kv, heads.v_dim)};
  }
  Tensor tensor(std::int64_t tokens, int heads, int dim) {
    const auto elems = static_cast<std::size_t>(tokens * heads * dim);
    CudaBuffer memory(elems * sizeof(bfloat16));
    auto* const data = reinterpret_cast<bfloat16*>(memory.data());
    ring_attention_bench::fill_normal<<<1024, 256, 0, site_.s>>>(data, elems,
                                                                 ++seed_ + 1000u * static_cast<unsigned>(site_.rank()));
    check_launch("fill_normal");
    const TensorRef ref(data, {1, tokens, heads, dim}, CudaExecutor{}.device());
    return {std::move(memory), ref};
  }

  /// Returns the rate.
  double add(const std::string& name, const std::string& way, double flops, double us, double alone_us, double bar) {
    std::vector<comm_bench::Bar> bars;
    if (bar > 0) {
      bars.push_back({std::to_string(static_cast<int>(bar)) + " TFLOP/s", flops / bar / 1e6});
      bars.push_back({"transfers removed / 0.93", alone_us / 0.93});
    }
    report_.add({name, way, 0, us, 0, alone_us}, bars);
    report_.line("%43s %.0f TFLOP/s; nothing transferred %.0f", "", flops / us / 1e6, flops / alone_us / 1e6);
    return flops / us / 1e6;
  }

  Site site_;
  Report& report_;
  unsigned seed_ = 1;
};

int work(NcclComm& world, CudaThreadComm*, const gpu_ranks::Options& options) {
  Report report(world.rank(), world.size(), options.worker, options.json);
  Rank rank(world, report, (options.quick ? std::size_t{4} : std::size_t{48}) << 30);
  report.title("ring attention, bf16, causal; floor: nothing transferred");
  const Heads mha{"32/32 d128", 32, 32, 128, 128};
  const auto seed = static_cast<unsigned>(std::stoul(options.value("--seed", "1")));
  const std::string rows = options.value("--rows", options.quick ? "16k" : "");
  const auto wants = [&](const char* row) { return rows.empty() || rows.find(row) != rows.npos; };
  if (wants("local")) rank.run_local(mha, one_document(16384), {590, 410}, 460);
  if (wants("16k")) rank.run(mha, one_document(16384), {540, 400, 540}, 116);
  if (wants("packed")) rank.run_packed(mha, 65536, seed);
  if (wants("32k")) rank.run(mha, one_document(32768), {560, 440, 560});
  if (wants("64k")) rank.run(mha, one_document(65536), {580, 480, 580});
  if (wants("128k") && world.size() >= 4) rank.run(mha, one_document(131072), {});  // too long to wait for on fewer
  for (const Heads& heads : {Heads{"32/4 d128", 32, 4, 128, 128}, Heads{"32/32 d64", 32, 32, 64, 64},
                             Heads{"16/16 d192/128", 16, 16, 192, 128}, Heads{"16/16 d256", 16, 16, 256, 256}}) {
    if (wants(heads.name)) rank.run(heads, one_document(32768), {});
  }
  if (wants("latents")) rank.run_latents({"16/16 d192/128", 16, 16, 192, 128}, 32768);
  return report.verdict(options.check);
}

}  // namespace

int main(int argc, char** argv) {
  return gpu_ranks::run("ring_attention_bench", argc, argv, {"--seed", "--rows"}, work);
}
