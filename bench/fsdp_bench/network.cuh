// The networks that fsdp_bench trains: units of matrices and gains, and their forward and backward pass on any memory
// that holds the weights.
#pragma once

#include <deque>
#include <memory>

#include <pleat/cuda/leaf.cuh>
#include <pleat/fsdp/plan.hpp>
#include <pleat/fsdp/view.hpp>

#include "gemm.cuh"
#include "kernels.cuh"

namespace fsdp_bench {

using pleat::check_launch;
using pleat::CudaBuffer;
using pleat::DType;
namespace fsdp = pleat::fsdp;

/// One step of a unit: a matrix [out, in], or a gain [in] where out is 0.
struct Step {
  int param;
  std::int64_t out, in;
};
/// Equal units in a row; the steps of each chain, and the units do.
struct Model {
  const char* name;
  int units;
  fsdp::UnitSpec unit;
  std::vector<Step> steps;
  int experts = 1;                   // each has matrices and tokens of its own
  std::int64_t tokens;               // of an expert, or of the rank
  std::vector<Step> odd_steps = {};  // of every other unit, as many; empty: the same

  const std::vector<Step>& steps_of(int u) const { return u % 2 == 1 && !odd_steps.empty() ? odd_steps : steps; }
};

inline Model squares(std::int64_t tokens) {
  constexpr std::int64_t width = 8192;
  return {"8 x 8192^2",        8, {.name = "square", .params = {{.name = "w", .shape = {width, width}}}},
          {{0, width, width}}, 1, tokens};
}
/// The parameters of a transformer layer with 4 query heads per key head: norms, a bottleneck of no round size, a
/// frozen and an unused parameter.
inline Model layers(std::int64_t tokens) {
  constexpr std::int64_t hidden = 4096, kv = 1024, ffn = 14336, odd = 1000;
  Model model{"8 layers", 8, {.name = "layer"}, {}, 1, tokens};
  const auto gain = [&](const char* name) {
    model.steps.push_back({static_cast<int>(model.unit.params.size()), 0, hidden});
    model.unit.params.push_back({.name = name, .shape = {hidden}, .weight_decay = false});
  };
  const auto matrix = [&](const char* name, std::int64_t out, std::int64_t in) {
    model.steps.push_back({static_cast<int>(model.unit.params.size()), out, in});
    model.unit.params.push_back({.name = name, .shape = {out, in}});
  };
  gain("attention_norm");
  matrix("query", hidden, hidden);
  matrix("key", kv, hidden);
  matrix("value", hidden, kv);
  matrix("output", hidden, hidden);
  gain("ffn_norm");
  matrix("gate", ffn, hidden);
  matrix("down", hidden, ffn);
  matrix("adapter_in", odd, hidden);
  matrix("adapter_out", hidden, odd);
  model.unit.params.push_back({.name = "rotary", .shape = {63}, .frozen = true});
  model.unit.params.push_back({.name = "unused", .shape = {}});
  return model;
}
/// 16 experts of one rank; `tokens` each.
inline Model experts(std::int64_t tokens) {
  constexpr std::int64_t hidden = 2048, ffn = 1408, count = 16;
  return {"4 expert units",
          4,
          {.name = "experts",
           .kind = pleat::Param::expert,
           .experts_local = count,
           .params = {{.name = "up", .shape = {ffn, hidden}}, {.name = "down", .shape = {hidden, ffn}}}},
          {{0, ffn, hidden}, {1, hidden, ffn}},
          static_cast<int>(count),
          tokens};
}

/// The same matrices, each a unit of its own: less sticks out of a step at its ends.
inline Model half_experts(std::int64_t tokens) {
  Model model = experts(tokens);
  const Step up = model.steps[0], down{0, model.steps[1].out, model.steps[1].in};
  model.name = "8 units of an expert matrix";
  model.units *= 2;
  model.unit.params = {{.name = "w", .shape = {up.out * up.in}}};
  model.steps = {up};
  model.odd_steps = {down};
  return model;
}

/// Activations and products of one rank.
class Network {
 public:
  /// `gradient`: what weight gradients are written in. `sms`: what the products of the backward pass are made for; 0:
  /// all.
  Network(const Model& model, const Cublas& cublas, const fsdp::UnitLayout& layout, DType gradient, int sms = 0)
      : model_(model), gradient_(gradient) {
    const std::int64_t batch = model.experts, tokens = model.tokens;
    std::int64_t widest = 0;
    for (const Step& step : all_steps(model)) {
      widest = std::max({widest, step.in, step.out});
      Products& p = products_.emplace_back();
      if (step.out == 0) continue;
      const std::int64_t stride = model.experts > 1 ? layout.expert_stride : step.out * step.in;
      const Matrices x{tokens, step.in, tokens * step.in}, y{tokens, step.out, tokens * step.out};
      const Matrices w{step.out, step.in, stride};
      Matrices w_t = w, y_t = y, dw = w;
      w_t.is_transposed = y_t.is_transposed = true;
      if (gradient == DType::f32) dw.type = CUDA_R_32F;
      p.forward = std::make_unique<Gemm>(cublas, x, w_t, y, static_cast<int>(batch), 0);
      p.input = std::make_unique<Gemm>(cublas, y, w, x, static_cast<int>(batch), sms);
      p.weight = std::make_unique<Gemm>(cublas, y_t, x, dw, static_cast<int>(batch), sms);
    }
    for (int u = 0; u < model.units; ++u) {
      for (const Step& step : model.steps_of(u)) activations_.emplace_back(bytes(batch * tokens * step.in));
    }
    activations_.emplace_back(bytes(batch * tokens * model.steps_of(model.units - 1).back().out));
    for (CudaBuffer& g : gradients_) g = CudaBuffer(bytes(batch * tokens * widest));
    parts_ = CudaBuffer(column_parts * static_cast<std::size_t>(widest) * sizeof(float));
  }

  /// Of activations and their gradients.
  std::size_t bytes() const {
    std::size_t sum = result_gradient_.size_bytes() + parts_.size_bytes();
    for (const CudaBuffer& buffer : activations_) sum += buffer.size_bytes();
    for (const CudaBuffer& buffer : gradients_) sum += buffer.size_bytes();
    return sum;
  }
  /// The inputs and the gradient of the result that a rank has.
  void draw_inputs(int rank, cudaStream_t s) {
    draw_into(activations_.front(), 0x1000u + static_cast<std::uint32_t>(rank), s);
    result_key_ = 0x2000u + static_cast<std::uint32_t>(rank);
    result_gradient_ = CudaBuffer(activations_.back().size_bytes());
    draw_into(result_gradient_, result_key_, s);
  }

  void forward(int unit, const fsdp::UnitView& weights, cudaStream_t s) const {
    for (std::size_t i = 0; i < model_.steps.size(); ++i) {
      const Step& step = model_.steps_of(unit)[i];
      const bfloat16* const in = activation(unit, i);
      bfloat16* const out = activation(unit, i + 1);
      const void* const w = weights[step.param].data();
      if (step.out != 0) {
        products(unit, i).forward->run(in, w, out, false, s);
      } else {
        scale_columns<<<grid, threads, 0, s>>>(out, in, static_cast<const bfloat16*>(w), rows(), width(step));
        check_launch("scale_columns");
      }
    }
  }

  /// `target(param)`: where that parameter's gradient goes, and whether it is added. `written()` is called when the
  /// unit's gradients are enqueued, before what is left of its pass.
  template <class Target, class Written>
  void backward(int unit, const fsdp::UnitView& weights, Target target, Written written, cudaStream_t s) const {
    const void* incoming = unit + 1 == model_.units ? result_gradient_.data() : gradients_[turn(unit, 0)].data();
    for (std::size_t i = model_.steps.size(); i-- > 0;) {
      const Step& step = model_.steps_of(unit)[i];
      void* const outgoing = gradients_[turn(unit, model_.steps.size() - i)].data();
      const bfloat16* const in = activation(unit, i);
      const void* const w = weights[step.param].data();
      const auto [gradient, accumulates] = target(step.param);
      if (step.out != 0) {
        products(unit, i).weight->run(incoming, in, gradient.data(), accumulates, s);
        if (i == 0) written();
        products(unit, i).input->run(incoming, w, outgoing, false, s);
      } else {
        gain_gradient(step, gradient.data(), incoming, in, accumulates, s);
        if (i == 0) written();
        scale_columns<<<grid, threads, 0, s>>>(static_cast<bfloat16*>(outgoing), static_cast<const bfloat16*>(incoming),
                                               static_cast<const bfloat16*>(w), rows(), width(step));
        check_launch("scale_columns");
      }
      incoming = outgoing;
    }
  }

 private:
  struct Products {
    std::unique_ptr<Gemm> forward, input, weight;
  };
  static constexpr unsigned grid = 1056, threads = 256;

  static std::vector<Step> all_steps(const Model& model) {
    std::vector<Step> all = model.steps;
    all.insert(all.end(), model.odd_steps.begin(), model.odd_steps.end());
    return all;
  }
  const Products& products(int unit, std::size_t step) const {
    const bool is_odd = &model_.steps_of(unit) == &model_.odd_steps;
    return products_[(is_odd ? model_.steps.size() : 0) + step];
  }
  static std::size_t bytes(std::int64_t elems) { return static_cast<std::size_t>(elems) * sizeof(bfloat16); }
  static std::size_t width(const Step& step) { return static_cast<std::size_t>(step.in); }
  std::size_t rows() const { return static_cast<std::size_t>(model_.tokens * model_.experts); }
  bfloat16* activation(int unit, std::size_t step) const {
    const std::size_t at = static_cast<std::size_t>(unit) * model_.steps.size() + step;
    return reinterpret_cast<bfloat16*>(activations_[at].data());
  }
  /// Which of the two buffers holds the gradient that is `steps` steps back from the end of the unit.
  std::size_t turn(int unit, std::size_t steps) const {
    return (static_cast<std::size_t>(model_.units - 1 - unit) * model_.steps.size() + steps) % 2;
  }
  static void draw_into(const CudaBuffer& buffer, std::uint32_t key, cudaStream_t s) {
    draw<<<grid, threads, 0, s>>>(reinterpret_cast<bfloat16*>(buffer.data()), key * 0x9E3779B1u, 0.0f, 1.0f,
                                  buffer.size_bytes() / sizeof(bfloat16));
    check_launch("draw");
  }
  void gain_gradient(const Step& step, void* gradient, const void* incoming, const bfloat16* in, bool accumulates,
                     cudaStream_t s) const {
    const auto columns = static_cast<unsigned>((step.in + threads - 1) / threads);
    const auto* const dy = static_cast<const bfloat16*>(incoming);
    auto* const parts = reinterpret_cast<float*>(parts_.data());
    column_products<<<dim3(columns, column_parts), threads, 0, s>>>(parts, dy, in, rows(), width(step));
    check_launch("column_products");
    if (gradient_ == DType::f32) {
      add_column_parts<<<columns, threads, 0, s>>>(static_cast<float*>(gradient), parts, width(step), accumulates);
    } else {
      add_column_parts<<<columns, threads, 0, s>>>(static_cast<bfloat16*>(gradient), parts, width(step), accumulates);
    }
    check_launch("add_column_parts");
  }

  Model model_;
  DType gradient_;
  std::vector<Products> products_;      // [step], then [odd step]
  std::deque<CudaBuffer> activations_;  // [unit, step], then the result
  CudaBuffer gradients_[2];             // of activations
  CudaBuffer result_gradient_, parts_;
  std::uint32_t result_key_ = 0;
};

}  // namespace fsdp_bench
