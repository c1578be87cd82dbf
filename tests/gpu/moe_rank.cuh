// One rank of the tests of the MoE layer on GPUs: the bound layer, its part of a problem in device memory, and results.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include <pleat/cuda/buffer.hpp>
#include <pleat/moe/cuda/leaf.cuh>

#include <conformance/site.hpp>
#include <support/copy_now.hpp>
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

/// What a problem is drawn from: ranks in processes of their own draw the same, from PLEAT_TEST_SEED.
inline unsigned draw_seed() {
  static std::mt19937 random([] {
    const char* const given = std::getenv("PLEAT_TEST_SEED");
    return given != nullptr ? static_cast<unsigned>(std::strtoul(given, nullptr, 10)) : std::random_device{}();
  }());
  return static_cast<unsigned>(random());
}

/// What each rank has of `parts`, [ranks], where ranks are processes that know their own alone.
template <class Comm>
void share(const GroupComm<Comm>& group, std::vector<std::string>& parts) {
  if constexpr (requires(Comm & comm) { comm.job().meet(comm.world_ranks(), std::uint64_t{}, std::string{}); }) {
    if (std::getenv("RANK") == nullptr || group.comm() == nullptr) return;
    constexpr auto tag = std::remove_cvref_t<decltype(group.comm()->job())>::first_tag + 77;
    parts = group.comm()->job().meet(group.comm()->world_ranks(), tag, parts[static_cast<std::size_t>(group.rank())]);
  }
}

/// The layer bound on one rank, with its part of a problem in device memory.
template <class Backend, class T, class ExpertLeaf = moe_leaf<cuda_device>>
class LayerRank {
 public:
  using Comm = typename Backend::comm_type;
  using Arena = typename Backend::arena_type;
  using Buffer = typename Backend::Buffer;
  using Acc = accumulator_t<T>;

  /// `layers` of the plan keep their rows at the same time.
  LayerRank(Comm& world, const moe::LayerPlan& plan, const Problem<T>& problem, const DelayingExecutor& executor,
            int layers = 1, ExpertLeaf leaf = {})
      : LayerRank(GroupComm<Comm>(world), GroupComm<Comm>(world), plan, problem, executor, layers, std::move(leaf)) {}
  /// An ep group of a stage, whose ranks share an arena; the problem is the group's.
  LayerRank(const GroupComm<Comm>& stage, const GroupComm<Comm>& ep, const moe::LayerPlan& plan,
            const Problem<T>& problem, const DelayingExecutor& executor, int layers = 1, ExpertLeaf leaf = {})
      : ep_(ep),
        plan_(plan),
        executor_(executor),
        scratch_(bytes(plan.footprint().scratch)),
        persistent_(bytes(plan.footprint().persistent)),
        pinned_(bytes(plan.footprint().pinned_host)),
        rows_memory_(bytes(plan.dispatch.has_arena() ? moe::LayerArena::bytes(plan) : 0)),
        arena_(stage, plan.footprint().symmetric),
        layer_(moe::bind(plan, executor, ep,
                         Memory<Arena>{scratch_.block(), persistent_.block(), pinned_.block(), &arena_}, stream_.get(),
                         std::move(leaf))),
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
    const auto rank = static_cast<std::size_t>(ep_.rank());
    sizes_ = p.sizes;
    tokens_ = p.tokens[rank];
    first_ = p.first_token(ep_.rank());
    const std::int64_t local = plan_.dispatch.experts_local(), matrix = sizes_.inner * sizes_.hidden;
    first_matrix_ = ep_.rank() * local * matrix;
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

  void wait() { ep_.wait(stream_.get()); }
  /// Copies the results to their places, of this rank or, where ranks are processes, of all; the rank has waited.
  void download(Answer<T>& all) {
    fetch(y_, all.y, first_ * sizes_.hidden, tokens_ * sizes_.hidden);
    fetch(dx_, all.dx, first_ * sizes_.hidden, tokens_ * sizes_.hidden);
    fetch(dlogits_, all.dlogits, first_ * sizes_.experts, tokens_ * sizes_.experts);
    fetch(dgate_, all.dgate, first_matrix_, matrix_elems_);
    fetch(dup_, all.dup, first_matrix_, matrix_elems_);
    fetch(ddown_, all.ddown, first_matrix_, matrix_elems_);
    std::vector<std::string> parts(static_cast<std::size_t>(ep_.size()));
    std::string& mine = parts[static_cast<std::size_t>(ep_.rank())];
    each_array(all, [&](auto& values) {
      mine.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(values[0]));
    });
    share(ep_, parts);
    for (const std::string& part : parts) {
      const char* from = part.data();
      each_array(all, [&](auto& values) {
        for (std::size_t i = 0; i < values.size() && !part.empty(); ++i, from += sizeof(values[0])) {
          const bool is_there = std::any_of(from, from + sizeof(values[0]), [](char c) { return c != '\xff'; });
          if (is_there) std::memcpy(&values[i], from, sizeof(values[0]));
        }
      });
    }
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
  template <class F>
  static void each_array(Answer<T>& all, const F& f) {
    f(all.y), f(all.dx), f(all.dlogits), f(all.dgate), f(all.dup), f(all.ddown);
  }
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

  GroupComm<Comm> ep_;
  moe::LayerPlan plan_;
  DelayingExecutor executor_;
  typename Backend::Stream stream_, side_;
  Buffer scratch_, persistent_;
  PinnedBuffer pinned_;
  Buffer rows_memory_;
  Arena arena_;
  moe::Layer<DelayingExecutor, Comm, Arena, ExpertLeaf> layer_;
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

}  // namespace moe_gpu_testing
