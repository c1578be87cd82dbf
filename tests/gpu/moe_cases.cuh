// The MoE layer on ranks with GPUs: against one rank in float64, with both transports, under delays, noise and budgets.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <deque>
#include <mutex>
#include <optional>
#include <random>

#include <pleat/cuda/buffer.hpp>
#include <pleat/moe/cuda/leaf.cuh>

#include <conformance/site.hpp>
#include <support/copy_now.hpp>
#include <support/repeats.hpp>
#include <support/watchdog.hpp>
#include <unit/moe/layer_problem.hpp>

#include "delays.cuh"

namespace moe_gpu_testing {

using namespace pleat;
using namespace std::chrono_literals;
using conformance::require;
using moe_testing::Answer;
using moe_testing::Problem;
using moe_testing::Sizes;
using templates_testing::DelayingExecutor;

inline moe::LayerPlan plan_of(const Sizes& s, int ranks, std::int64_t max_tokens, DType dtype,
                              const moe::DispatchOptions& dispatch) {
  return moe::plan(ranks, moe::LayerShape{max_tokens, s.hidden, s.inner, s.experts, s.k, dtype},
                   {.router = {}, .dispatch = dispatch, .experts = {.max_ctas = dispatch.max_ctas}});
}

template <class T>
Answer<T> poisoned(const Problem<T>& p) {
  Answer<T> a;
  const auto fill = [](auto& values, std::int64_t count) {
    values.resize(static_cast<std::size_t>(count));
    std::memset(static_cast<void*>(values.data()), 0xff, values.size() * sizeof(values[0]));
  };
  const std::int64_t matrix = p.sizes.experts * p.sizes.inner * p.sizes.hidden;
  fill(a.y, p.total() * p.sizes.hidden);
  fill(a.dx, p.total() * p.sizes.hidden);
  fill(a.dlogits, p.total() * p.sizes.experts);
  fill(a.dgate, matrix);
  fill(a.dup, matrix);
  fill(a.ddown, matrix);
  return a;
}

/// The layer bound on one rank, with its part of a problem in device memory.
template <class Backend, class T>
class LayerRank {
 public:
  using Comm = typename Backend::comm_type;
  using Arena = typename Backend::arena_type;
  using Buffer = typename Backend::Buffer;
  using Acc = accumulator_t<T>;

  /// `layers` of the plan keep their rows at the same time.
  LayerRank(Comm& world, const moe::LayerPlan& plan, const Problem<T>& problem, const DelayingExecutor& executor,
            int layers = 1)
      : world_(world),
        plan_(plan),
        executor_(executor),
        scratch_(bytes(plan.footprint().scratch)),
        persistent_(bytes(plan.footprint().persistent)),
        pinned_(bytes(plan.footprint().pinned_host)),
        rows_memory_(bytes(plan.dispatch.has_arena() ? moe::LayerArena::bytes(plan) : 0)),
        arena_(GroupComm<Comm>(world), plan.footprint().symmetric),
        layer_(moe::bind(plan, executor, GroupComm<Comm>(world),
                         Memory<Arena>{scratch_.block(), persistent_.block(), pinned_.block(), &arena_},
                         stream_.get())),
        rows_(make_rows()) {
    for (int i = 0; i < layers; ++i) {
      saved_memory_.emplace_back(bytes(plan.footprint().saved));
      const Block block = saved_memory_.back().block();
      rows_ ? saved_.emplace_back(plan, block, *rows_) : saved_.emplace_back(plan, block);
    }
    load(problem);
  }

  /// Gives the rank its part of another problem of the same sizes.
  void load(const Problem<T>& p) {
    const auto rank = static_cast<std::size_t>(world_.rank());
    sizes_ = p.sizes;
    tokens_ = p.tokens[rank];
    first_ = p.first_token(world_.rank());
    const std::int64_t local = plan_.dispatch.experts_local(), matrix = sizes_.inner * sizes_.hidden;
    first_matrix_ = world_.rank() * local * matrix;
    matrix_elems_ = local * matrix;
    upload(x_, p.x, first_ * sizes_.hidden, tokens_ * sizes_.hidden);
    upload(dy_, p.dy, first_ * sizes_.hidden, tokens_ * sizes_.hidden);
    upload(logits_, p.logits, first_ * sizes_.experts, tokens_ * sizes_.experts);
    upload(gate_, p.gate, first_matrix_, matrix_elems_);
    upload(up_, p.up, first_matrix_, matrix_elems_);
    upload(down_, p.down, first_matrix_, matrix_elems_);
    std::vector<std::uint8_t> routed;
    for (std::int64_t t = first_; t < first_ + tokens_; ++t) {
      routed.push_back(p.ids[static_cast<std::size_t>(t * sizes_.k)] >= 0);
    }
    upload(routed_, routed, 0, tokens_);
    poison();
  }
  void poison() {
    reserve(y_, static_cast<std::size_t>(tokens_ * sizes_.hidden) * sizeof(T));
    reserve(dx_, static_cast<std::size_t>(tokens_ * sizes_.hidden) * sizeof(T));
    reserve(dlogits_, static_cast<std::size_t>(tokens_ * sizes_.experts) * sizeof(Acc));
    for (auto* gradient : {&dgate_, &dup_, &ddown_})
      reserve(*gradient, static_cast<std::size_t>(matrix_elems_) * sizeof(Acc));
  }

  /// Enqueues forward and backward of all layers, whose inputs and results are the same arrays.
  void run() {
    for (std::size_t i = 0; i < saved_.size(); ++i) forward(i);
    for (std::size_t i = saved_.size(); i-- > 0;) backward(i);
  }
  void forward(std::size_t layer) {
    executor_.delay(stream_.get());
    layer_.forward(streams(), rows(x_, dtype_of<T>, sizes_.hidden), rows(logits_, dtype_of<Acc>, sizes_.experts),
                   matrices<T>(gate_, up_, down_), saved_[layer], rows(y_, dtype_of<T>, sizes_.hidden),
                   {.routed = TensorRef(routed_->block().data, DType::u8, {tokens_}, executor_.device())});
  }
  void backward(std::size_t layer) {
    executor_.delay(stream_.get());
    layer_.backward(streams(), rows(dy_, dtype_of<T>, sizes_.hidden), rows(logits_, dtype_of<Acc>, sizes_.experts),
                    matrices<T>(gate_, up_, down_), TensorRef{}, saved_[layer], rows(dx_, dtype_of<T>, sizes_.hidden),
                    rows(dlogits_, dtype_of<Acc>, sizes_.experts), matrices<Acc>(dgate_, dup_, ddown_), false);
  }

  void wait() { world_.wait(stream_.get()); }
  /// Copies this rank's results to their places; the rank has waited.
  void download(Answer<T>& all) {
    fetch(y_, all.y, first_ * sizes_.hidden, tokens_ * sizes_.hidden);
    fetch(dx_, all.dx, first_ * sizes_.hidden, tokens_ * sizes_.hidden);
    fetch(dlogits_, all.dlogits, first_ * sizes_.experts, tokens_ * sizes_.experts);
    fetch(dgate_, all.dgate, first_matrix_, matrix_elems_);
    fetch(dup_, all.dup, first_matrix_, matrix_elems_);
    fetch(ddown_, all.ddown, first_matrix_, matrix_elems_);
  }
  moe::DispatchStatus check() { return layer_.check(streams()); }
  cudaStream_t stream() const { return stream_.get(); }
  /// Rows of the arena that are in use; the rank has waited.
  std::int64_t used_rows() const {
    std::int64_t used = -1;
    testing_support::copy_now(&used, rows_->rows.used_rows, sizeof used);
    return used;
  }

 private:
  Streams<cudaStream_t> streams() const { return {stream_.get(), side_.get()}; }
  std::optional<moe::LayerArena> make_rows() const {
    if (!plan_.dispatch.has_arena()) return {};
    return moe::LayerArena(plan_, executor_, rows_memory_.block(), stream_.get());
  }
  TensorRef rows(const std::optional<Buffer>& b, DType dtype, std::int64_t cols) const {
    return {b->block().data, dtype, {tokens_, cols}, executor_.device()};
  }
  template <class E>
  moe::ExpertMatrices matrices(const std::optional<Buffer>& gate, const std::optional<Buffer>& up,
                               const std::optional<Buffer>& down) const {
    const auto matrix = [&](const std::optional<Buffer>& b, std::int64_t r, std::int64_t c) {
      return moe::expert_matrix(reinterpret_cast<E*>(b->block().data), plan_.dispatch.experts_local(), r, c,
                                sizes_.inner * sizes_.hidden, executor_.device());
    };
    return {matrix(gate, sizes_.inner, sizes_.hidden), matrix(up, sizes_.inner, sizes_.hidden),
            matrix(down, sizes_.hidden, sizes_.inner)};
  }
  static std::size_t bytes(std::size_t needed) { return std::max<std::size_t>(needed, 1); }
  static void reserve(std::optional<Buffer>& buffer, std::size_t size) {
    if (!buffer || buffer->block().size_bytes != bytes(size)) {
      buffer.emplace(bytes(size));
    } else {
      check_cuda(cudaMemset(buffer->block().data, 0xff, size), "cudaMemset");
      check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    }
  }
  template <class E>
  static void upload(std::optional<Buffer>& buffer, const std::vector<E>& all, std::int64_t first, std::int64_t count) {
    reserve(buffer, static_cast<std::size_t>(count) * sizeof(E));
    if (count != 0) buffer->upload(reinterpret_cast<const std::byte*>(all.data() + first));
  }
  template <class E>
  static void fetch(const std::optional<Buffer>& buffer, std::vector<E>& all, std::int64_t first, std::int64_t count) {
    if (count != 0) buffer->download(reinterpret_cast<std::byte*>(all.data() + first));
  }

  Comm& world_;
  moe::LayerPlan plan_;
  DelayingExecutor executor_;
  typename Backend::Stream stream_, side_;
  Buffer scratch_, persistent_;
  PinnedBuffer pinned_;
  Buffer rows_memory_;
  Arena arena_;
  moe::Layer<DelayingExecutor, Comm, Arena> layer_;
  std::optional<moe::LayerArena> rows_;
  std::deque<Buffer> saved_memory_;
  std::deque<moe::LayerSaved> saved_;
  Sizes sizes_;
  std::int64_t tokens_ = 0, first_ = 0, first_matrix_ = 0, matrix_elems_ = 0;
  std::optional<Buffer> x_, dy_, logits_, gate_, up_, down_, routed_, y_, dx_, dlogits_, dgate_, dup_, ddown_;
};

inline std::int64_t most_tokens(const std::vector<std::int64_t>& tokens) {
  return std::max<std::int64_t>(1, *std::max_element(tokens.begin(), tokens.end()));
}
/// Unequal numbers of tokens, 0 among them.
inline std::vector<std::int64_t> uneven_tokens(int ranks) {
  const std::int64_t tokens[] = {70, 0, 33, 1, 129, 0, 12, 90};
  return {tokens, tokens + ranks};
}

/// Some tokens become padding.
template <class T>
void mask(Problem<T>& p, unsigned seed, unsigned one_in) {
  std::mt19937 random(seed);
  for (std::int64_t t = 0; t < p.total(); ++t) {
    if (random() % one_in == 0) std::fill_n(p.ids.begin() + t * p.sizes.k, p.sizes.k, -1);
  }
}

template <class T>
double gpu_tolerance() {
  return std::is_same_v<T, double> ? 1e-12 : std::is_same_v<T, float> ? 1e-5 : 2e-2;
}

struct Outcome {
  int cases = 0;
  double worst = 0;
};

template <class Backend, class T>
Answer<T> run_once(int ranks, const Problem<T>& p, const moe::DispatchOptions& options, unsigned seed) {
  const moe::LayerPlan plan = plan_of(p.sizes, ranks, most_tokens(p.tokens), dtype_of<T>, options);
  Answer<T> answer = poisoned(p);
  Backend::run(ranks, 60s, [&](typename Backend::comm_type& world) {
    LayerRank<Backend, T> rank(world, plan, p, {seed + static_cast<unsigned>(world.rank()), nullptr});
    rank.run();
    rank.run();
    rank.wait();
    rank.check();
    rank.download(answer);
  });
  return answer;
}

/// Against one rank in float64; both transports give the same bits.
template <class Backend, class T>
Outcome check_layer(int ranks) {
  Outcome outcome;
  const Sizes all_sizes[] = {{.hidden = 64, .inner = 48, .experts = 8 * ranks, .k = 4},
                             {.hidden = 36, .inner = 20, .experts = 2 * ranks, .k = 2},
                             {.hidden = 72, .inner = 64, .experts = ranks * 3, .k = 3}};
  for (const Sizes& sizes : all_sizes) {
    Problem<T> p(sizes, uneven_tokens(ranks), std::random_device{}());
    mask(p, 5, 6);
    const Answer<double> expected = moe_testing::solve(p);
    std::optional<Answer<T>> first;
    for (const Transport transport : {Transport::peer, Transport::collective}) {
      const Answer<T> answer = run_once<Backend>(ranks, p, {.transport = transport}, std::random_device{}());
      const double off = moe_testing::worst(answer, expected);
      require(off < gpu_tolerance<T>(), name_of(transport), ", experts ", sizes.experts, ": off by ",
              std::to_string(off).c_str(), "; y ", std::to_string(moe_testing::relative(answer.y, expected.y)).c_str(),
              " dx ", std::to_string(moe_testing::relative(answer.dx, expected.dx)).c_str(), " dlogits ",
              std::to_string(moe_testing::relative(answer.dlogits, expected.dlogits)).c_str(), " dgate ",
              std::to_string(moe_testing::relative(answer.dgate, expected.dgate)).c_str(), " ddown ",
              std::to_string(moe_testing::relative(answer.ddown, expected.ddown)).c_str());
      if (!first) first = answer;
      require(answer == *first, "the bits depend on the transport");
      outcome.worst = std::max(outcome.worst, off);
      ++outcome.cases;
    }
  }
  return outcome;
}

/// The same bits a hundred times: with delays, beside collectives and kernels that take multiprocessors away, whatever
/// the budget, and when a rank is 10 ms late, so that whatever the others do not wait for is long overwritten.
template <class Backend, class T>
Outcome check_bits(int ranks, int runs_per_budget) {
  using Buffer = typename Backend::Buffer;
  Problem<T> p({.hidden = 136, .inner = 64, .experts = 8 * ranks, .k = 8}, uneven_tokens(ranks),
               std::random_device{}());
  std::optional<Answer<T>> first;
  Outcome outcome;
  for (const int max_ctas : {0, 1, 5, 40}) {
    const moe::LayerPlan plan = plan_of(p.sizes, ranks, most_tokens(p.tokens), dtype_of<T>,
                                        {.transport = Transport::peer, .max_ctas = max_ctas});
    std::vector<Answer<T>> answers(static_cast<std::size_t>(runs_per_budget), poisoned(p));
    Backend::run(ranks, 60s, [&](typename Backend::comm_type& world) {
      std::mt19937 random(std::random_device{}());
      const CudaStream noise;
      auto side = world.split(0, world.rank());
      constexpr std::size_t noise_elems = std::size_t{1} << 18;
      Buffer from(noise_elems * sizeof(float)), to(noise_elems * sizeof(float) * static_cast<std::size_t>(ranks));
      LayerRank<Backend, T> rank(world, plan, p, {static_cast<unsigned>(random()), nullptr});
      for (Answer<T>& answer : answers) {
        rank.poison();
        templates_testing::spin<<<static_cast<unsigned>(1 + random() % 200), 1024, 0, noise>>>(random() % 100'000);
        check_launch("spin");
        side.all_gather(from.block().data, to.block().data, noise_elems, DType::f32, noise);
        if (const auto i = &answer - answers.data(); i % 5 == 0 && i / 5 % ranks == world.rank()) {
          templates_testing::spin<<<1, 1, 0, rank.stream()>>>(10'000'000);
          check_launch("spin");
        }
        rank.run();
        rank.wait();
        rank.download(answer);
      }
      rank.check();
      side.wait(noise);
    });
    for (const Answer<T>& answer : answers) {
      if (!first) first = answer;
      require(answer == *first, "run ", outcome.cases, " with max_ctas=", max_ctas, " has other bits");
      ++outcome.cases;
    }
  }
  return outcome;
}

/// What only some ranks see ends in the same error on every rank.
template <class Backend>
Outcome check_errors(int ranks) {
  Outcome outcome;
  const Problem<float> p({.hidden = 16, .inner = 16, .experts = 2 * ranks, .k = 2}, uneven_tokens(ranks), 3);
  const auto texts = [&](std::int64_t max_tokens, const moe::DispatchOptions& options) {
    const moe::LayerPlan plan = plan_of(p.sizes, ranks, max_tokens, DType::f32, options);
    std::vector<std::string> all(static_cast<std::size_t>(ranks));
    Backend::run(ranks, 60s, [&](typename Backend::comm_type& world) {
      LayerRank<Backend, float> rank(world, plan, p, {});
      rank.run();
      rank.wait();
      std::string& text = all[static_cast<std::size_t>(world.rank())];
      try {
        text = "dropped " + std::to_string(rank.check().dropped_rows);
      } catch (const shape_error& e) {
        text = e.what();
      }
    });
    for (const std::string& text : all) {
      require(text == all[0], "ranks differ: '", text.c_str(), "' and '", all[0].c_str(), "'");
    }
    ++outcome.cases;
    return all[0];
  };
  for (const Transport transport : {Transport::peer, Transport::collective}) {
    const std::string many = texts(69, {.transport = transport});
    require(many.find("pleat[E08]: rank 0 of the ep group") == 0, "too many tokens: ", many.c_str());
    const std::string full = texts(129, {.transport = transport, .overflow = moe::Overflow::error, .max_rows = 3});
    require(full.find("pleat[E10]: rank 0 of the ep group") == 0, "too many rows: ", full.c_str());
    const std::string dropped =
        texts(129, {.transport = transport, .overflow = moe::Overflow::drop_lowest, .max_rows = 3});
    std::int64_t choices = 0;
    for (const std::int32_t id : p.ids) choices += id >= 0;
    require(dropped == "dropped " + std::to_string(choices - 3 * ranks), "dropped rows: ", dropped.c_str());
  }
  return outcome;
}

/// The least rows of an arena that holds all problems' layers, by their real choices.
template <class T>
std::int64_t arena_rows_of(const std::vector<Problem<T>>& problems, int ranks, std::int64_t alignment) {
  const int local = problems[0].sizes.experts / ranks;
  std::int64_t most = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    std::int64_t rows = (alignment - 1) * local;
    for (const Problem<T>& p : problems) {
      for (int expert = rank * local; expert < (rank + 1) * local; ++expert) {
        rows += (std::count(p.ids.begin(), p.ids.end(), expert) + alignment - 1) / alignment * alignment;
      }
    }
    most = std::max(most, rows);
  }
  return (most + alignment - 1) / alignment * alignment;
}

/// Three layers share an arena that just holds them: gradients against one rank in float64, and an arena that is a bit
/// too small is an error on every rank.
template <class Backend, class T>
Outcome check_arena(int ranks) {
  const Sizes sizes{.hidden = 64, .inner = 48, .experts = 4 * ranks, .k = 4};
  std::vector<Problem<T>> problems;
  std::vector<Answer<T>> answers;
  std::vector<std::int64_t> tokens = uneven_tokens(ranks);
  for (unsigned i = 0; i < 3; ++i) {
    problems.emplace_back(sizes, tokens, std::random_device{}());
    mask(problems.back(), i, 5);
    answers.push_back(poisoned(problems.back()));
    std::rotate(tokens.begin(), tokens.begin() + 1, tokens.end());
  }
  constexpr std::int64_t alignment = 16;
  Outcome outcome;
  for (const Transport transport : {Transport::peer, Transport::collective}) {
    const std::int64_t least = arena_rows_of(problems, ranks, alignment);
    for (const std::int64_t arena_rows : {least, least - 4 * alignment * 4}) {
      const moe::LayerPlan plan = plan_of(sizes, ranks, 129, dtype_of<T>,
                                          {.transport = transport,
                                           .row_alignment = alignment,
                                           .overflow = moe::Overflow::error,
                                           .arena_rows = arena_rows});
      std::vector<std::string> texts(static_cast<std::size_t>(ranks));
      Backend::run(ranks, 60s, [&](typename Backend::comm_type& world) {
        LayerRank<Backend, T> rank(world, plan, problems[0], {static_cast<unsigned>(world.rank()), nullptr}, 3);
        std::vector<Answer<T>> own;
        for (std::size_t i = 0; i < 3; ++i) {
          rank.load(problems[i]);
          rank.forward(i);
          rank.wait();
        }
        require(rank.used_rows() <= arena_rows, "rows past the arena's end");
        for (std::size_t i = 3; i-- > 0;) {
          rank.load(problems[i]);
          rank.backward(i);
          rank.wait();
          if (arena_rows == least) rank.download(answers[i]);
        }
        require(rank.used_rows() == 0, "rows in use after the step: ", rank.used_rows());
        try {
          rank.check();
        } catch (const shape_error& e) {
          texts[static_cast<std::size_t>(world.rank())] = e.what();
        }
      });
      for (const std::string& text : texts) {
        require(text == texts[0], "ranks differ: '", text.c_str(), "' and '", texts[0].c_str(), "'");
      }
      require((texts[0].find("pleat[E10]") == 0) == (arena_rows != least), "arena_rows=", arena_rows, ", least ", least,
              ": ", texts[0].c_str());
      ++outcome.cases;
    }
    for (std::size_t i = 0; i < 3; ++i) {
      Answer<double> expected = moe_testing::solve(problems[i]);
      const double off = std::max({moe_testing::relative(answers[i].dx, expected.dx),
                                   moe_testing::relative(answers[i].dlogits, expected.dlogits),
                                   moe_testing::relative(answers[i].dgate, expected.dgate),
                                   moe_testing::relative(answers[i].dup, expected.dup),
                                   moe_testing::relative(answers[i].ddown, expected.ddown)});
      require(off < gpu_tolerance<T>(), "layer ", static_cast<int>(i), " is off by ", std::to_string(off).c_str());
      outcome.worst = std::max(outcome.worst, off);
    }
  }
  return outcome;
}

/// Forward and backward are captured once, which a wait of the host would end, and replayed with other routings and
/// numbers of tokens that count, 0 among them; two layers, with an arena or without. Ranks with a GPU each.
template <class Backend, class T>
Outcome check_graph(int ranks, bool has_arena) {
  const Sizes sizes{.hidden = 64, .inner = 48, .experts = 8 * ranks, .k = 4};
  std::vector<Problem<T>> problems;
  std::vector<Answer<T>> answers;
  for (unsigned i = 0; i < 6; ++i) {
    problems.emplace_back(sizes, std::vector<std::int64_t>(static_cast<std::size_t>(ranks), 64),
                          std::random_device{}());
    mask(problems.back(), i, i == 3 ? 1 : i + 2);
    answers.push_back(poisoned(problems.back()));
  }
  moe::DispatchOptions options{.transport = Transport::peer};
  const std::int64_t own_rows = plan_of(sizes, ranks, 64, dtype_of<T>, options).dispatch.capacity_rows();
  if (has_arena) {
    options.overflow = moe::Overflow::error;
    options.arena_rows = 2 * own_rows;
  }
  const moe::LayerPlan plan = plan_of(sizes, ranks, 64, dtype_of<T>, options);
  Backend::run(ranks, 60s, [&](typename Backend::comm_type& world) {
    LayerRank<Backend, T> rank(world, plan, problems[0], {}, 2);
    rank.run();
    rank.wait();
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    check_cuda(cudaStreamBeginCapture(rank.stream(), cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    rank.run();
    check_cuda(cudaStreamEndCapture(rank.stream(), &graph), "cudaStreamEndCapture");
    check_cuda(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
    for (std::size_t i = 0; i < problems.size(); ++i) {
      rank.load(problems[i]);
      check_cuda(cudaGraphLaunch(exec, rank.stream()), "cudaGraphLaunch");
      rank.wait();
      rank.download(answers[i]);
    }
    rank.check();
    (void)cudaGraphExecDestroy(exec);
    (void)cudaGraphDestroy(graph);
  });
  Outcome outcome;
  for (std::size_t i = 0; i < problems.size(); ++i) {
    const double off = moe_testing::worst(answers[i], moe_testing::solve(problems[i]));
    require(off < gpu_tolerance<T>(), "replay ", i, " is off by ", std::to_string(off).c_str());
    outcome.worst = std::max(outcome.worst, off);
    ++outcome.cases;
  }
  return outcome;
}

/// Prints a row of the table; whether it failed.
template <class Check>
bool fails(const char* backend, const char* what, int ranks, const Check& check) {
  const auto start = std::chrono::steady_clock::now();
  Outcome outcome;
  std::string failure;
  try {
    const testing_support::Watchdog watchdog(std::string(what) + " on " + backend, 90s);
    outcome = check();
  } catch (const std::exception& e) {
    failure = e.what();
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  std::printf("%-6s  %-20s  %-18s  %2d ranks  %3d cases  worst %.1e  %5.1f s\n", failure.empty() ? "ok" : "FAILED",
              backend, what, ranks, outcome.cases, outcome.worst, took.count());
  if (!failure.empty()) std::printf("        %s\n", failure.c_str());
  std::fflush(stdout);
  return !failure.empty();
}

/// Returns how many failed.
template <class Backend>
int check_all(const char* backend, std::initializer_list<int> sizes, int runs_per_budget) {
  int failed = 0;
  for (const int ranks : sizes) {
    failed += fails(backend, "layer f64", ranks, [&] { return check_layer<Backend, double>(ranks); });
    failed += fails(backend, "layer bf16", ranks, [&] { return check_layer<Backend, bfloat16>(ranks); });
    failed += fails(backend, "arena f64", ranks, [&] { return check_arena<Backend, double>(ranks); });
    failed += fails(backend, "arena bf16", ranks, [&] { return check_arena<Backend, bfloat16>(ranks); });
    failed += fails(backend, "errors", ranks, [&] { return check_errors<Backend>(ranks); });
    failed += fails(backend, "bits", ranks, [&] { return check_bits<Backend, bfloat16>(ranks, runs_per_budget); });
  }
  return failed;
}

}  // namespace moe_gpu_testing
