// Where a step's time goes: when its operations ran on the stream that computes, read once the step is done.
#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include <pleat/pipeline.hpp>

namespace train_moe {

/// Seconds of a step on one rank.
struct StepSeconds {
  double forward = 0;
  double backward = 0;  // of inputs, of weights, or both
  double pairs = 0;     // a forward beside a backward
  double waiting = 0;   // between operations: for other stages, and before the first
  double norm = 0;      // what is left of the gradients' sums, and their norm
  double update = 0;    // with the host's look at the norm
  double all = 0;
};

/// The clock of a rank, which sees its operations as pleat::pipeline runs them, and names them for profilers.
template <class Backend>
class StepTimes {
 public:
  using Stream = typename Backend::Stream;

  explicit StepTimes(const pleat::pipeline::Order& ops) : ops_(ops) {
    for (const pleat::pipeline::Op& op : ops) names_.emplace_back(pleat::message_of(op).c_str());
  }

  void begin(Stream s) { clock_.mark(0, s); }
  void before(int op, Stream s) {
    range_.emplace(names_[static_cast<std::size_t>(op)].c_str());
    clock_.mark(start_of(static_cast<std::size_t>(op)), s);
  }
  void after(int op, Stream s) {
    clock_.mark(start_of(static_cast<std::size_t>(op)) + 1, s);
    range_.reset();
  }
  void norm_is_known(Stream s) { clock_.mark(norm(), s); }
  void end(Stream s) { clock_.mark(norm() + 1, s); }

  /// Of a step that was waited for.
  StepSeconds read() const {
    StepSeconds t;
    double last = 0, busy = 0;
    for (std::size_t i = 0; i < ops_.size(); ++i) {
      const pleat::pipeline::Span span = span_of(i);
      using pleat::pipeline::OpKind;
      const OpKind kind = ops_[i].kind;
      double& sum = kind == OpKind::forward ? t.forward : kind == OpKind::overlapped ? t.pairs : t.backward;
      sum += span.finish - span.start;
      busy += span.finish - span.start;
      last = span.finish;
    }
    t.waiting = last - busy;
    const double known = clock_.seconds(0, norm());
    t.norm = known - last;
    t.all = clock_.seconds(0, norm() + 1);
    t.update = t.all - known;
    return t;
  }
  /// [ops], since the step began.
  std::vector<pleat::pipeline::Span> spans() const {
    std::vector<pleat::pipeline::Span> spans;
    for (std::size_t i = 0; i < ops_.size(); ++i) spans.push_back(span_of(i));
    return spans;
  }

 private:
  static std::size_t start_of(std::size_t op) { return 1 + 2 * op; }
  std::size_t norm() const { return start_of(ops_.size()); }
  pleat::pipeline::Span span_of(std::size_t op) const {
    return {clock_.seconds(0, start_of(op)), clock_.seconds(0, start_of(op) + 1)};
  }

  pleat::pipeline::Order ops_;
  std::vector<std::string> names_;
  typename Backend::Clock clock_;
  std::optional<typename Backend::Range> range_;
};

}  // namespace train_moe
