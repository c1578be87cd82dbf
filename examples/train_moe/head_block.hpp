// The end of the model: final norm, scores, loss and their gradients, made at one time, a few tokens at a time.
#pragma once

#include <algorithm>

#include <pleat/core/carve.hpp>
#include <pleat/fsdp.hpp>
#include <pleat/optim.hpp>

#include "lane.hpp"
#include "units.hpp"

namespace train_moe {

template <class Backend, class T>
class HeadBlock {
 public:
  using A = pleat::accumulator_t<T>;
  using Gradient = pleat::fsdp::GradientView<typename Backend::Executor>;

  /// Tokens whose scores exist at one time.
  static constexpr std::int64_t most_rows = 4096;
  static constexpr std::int64_t rows_at_once(std::int64_t tokens) {
    return std::max<std::int64_t>(1, std::min(tokens, most_rows));
  }

  HeadBlock() = default;
  /// `tokens`: the most of a micro-batch. Borrows memory.
  HeadBlock(pleat::Carver& memory, const ModelShape& model, std::int64_t tokens)
      : model_(model), rows_(rows_at_once(tokens)) {
    const auto all = static_cast<std::size_t>(tokens);
    normed_ = memory.take<T>(all * static_cast<std::size_t>(model.hidden));
    rms_ = memory.take<A>(all);
    scores_ = memory.take<T>(static_cast<std::size_t>(rows_ * model.vocabulary));
    dnorm_ = memory.take<A>(static_cast<std::size_t>(model.hidden));
  }

  /// `last` [rows, hidden], the output of the last layer, becomes its gradient; *sums takes loss and targets.
  void run(const Lane<Backend>& lane, const DeviceBatch& batch, const pleat::fsdp::UnitView& w, Gradient& gradient,
           T* last, pleat::optim::StepSums* sums) const {
    auto& kernels = *lane.kernels;
    const auto s = lane.stream();
    const std::int64_t rows = batch.rows(), hidden = model_.hidden, classes = model_.vocabulary;
    const T* const norm = w[head_param::norm].template as<T>();
    const T* const matrix = w[head_param::head].template as<T>();
    kernels.rms_norm(rows_in(last, hidden), norm, rows_out(normed_, hidden), rms_, rows, hidden, model_.epsilon, s);
    const auto [dmatrix, add] = gradient.write(head_param::head);
    for (std::int64_t row = 0; row == 0 || row < rows; row += rows_) {  // once where there are none: dmatrix is written
      const std::int64_t part = std::min(rows_, rows - row);
      T* const in = normed_ + row * hidden;
      kernels.linear(rows_in(in, hidden), matrix, scores_, part, hidden, classes, nullptr, s);
      kernels.cross_entropy(scores_, batch.labels + row, &sums->loss, part, classes, s);
      kernels.linear_weight_gradient(scores_, rows_in(in, hidden), dmatrix.template as<A>(), add || row > 0, part,
                                     hidden, classes, s);
      kernels.linear_input_gradient(scores_, matrix, in, false, part, hidden, classes, s);
    }
    kernels.rms_norm_backward(rows_in(normed_, hidden), rows_in(last, hidden), norm, rms_, Rows<const T>{},
                              rows_out(last, hidden), dnorm_, rows, hidden, s);
    write_gradient<typename Backend::Executor>(gradient, head_param::norm, dnorm_, s);
    const auto& labels = batch.host.labels;
    const auto targets = std::count_if(labels.begin(), labels.end(), [](std::int32_t label) { return label >= 0; });
    kernels.add_constant(&sums->tokens, static_cast<double>(targets), s);
  }

 private:
  ModelShape model_;
  std::int64_t rows_ = 1;
  T* normed_ = nullptr;  // [tokens, hidden]
  A* rms_ = nullptr;     // [tokens]
  T* scores_ = nullptr;  // [rows_, vocabulary]
  A* dnorm_ = nullptr;   // [hidden]
};

}  // namespace train_moe
