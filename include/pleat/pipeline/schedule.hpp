// A pipeline schedule as data: what each rank computes, in order, and between which operations it exchanges tensors.
#pragma once

#include <string_view>
#include <vector>

#include <pleat/core/error.hpp>

namespace pleat::inline v0::pipeline {

/// The schedules that can be made.
enum class Kind : unsigned char { one_f_one_b, one_f_one_b_pairs, zb_v, dualpipe_v };
inline constexpr Kind all_kinds[] = {Kind::one_f_one_b, Kind::one_f_one_b_pairs, Kind::zb_v, Kind::dualpipe_v};

constexpr const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::one_f_one_b:
      return "1f1b";
    case Kind::one_f_one_b_pairs:
      return "1f1b-pairs";
    case Kind::zb_v:
      return "zb-v";
    case Kind::dualpipe_v:
      return "dualpipev";
  }
  return "";
}
/// The stages that a rank holds.
constexpr int chunks_per_rank(Kind kind) {
  return kind == Kind::zb_v || kind == Kind::dualpipe_v ? 2 : 1;
}
/// The schedule that `name_of` calls so; zbv is zb-v, too. Errors: shape_error P09.
constexpr Kind parse_kind(std::string_view name) {
  for (const Kind kind : all_kinds) {
    if (name == name_of(kind)) return kind;
  }
  if (name == "zbv") return Kind::zb_v;
  fail<shape_error>("pleat[P09]: no schedule is called \"", name, "\"; valid: 1f1b 1f1b-pairs zb-v dualpipev");
}

/// One micro-batch on one chunk: the layers of one stage, of which a rank holds `chunks_per_rank`.
struct Part {
  int chunk = 0;
  int micro_batch = 0;
  friend constexpr bool operator==(const Part&, const Part&) = default;
};

/// - backward: gradients of input and weights in one pass
/// - input_backward, weight_backward: the same as two passes, the second at any later time
/// - overlapped: the forward of one micro-batch beside the backward of another
enum class OpKind : unsigned char { forward, backward, input_backward, weight_backward, overlapped };

/// What a rank computes without a transfer in between. `forward` is used by forward and overlapped, `backward` by all
/// but forward.
struct Op {
  OpKind kind = OpKind::forward;
  Part forward = {};
  Part backward = {};

  /// Whether a forward pass is in it.
  constexpr bool has_forward() const { return kind == OpKind::forward || kind == OpKind::overlapped; }
  /// Whether it makes the gradient of the input, on which the previous stage waits.
  constexpr bool has_input_gradient() const { return kind != OpKind::forward && kind != OpKind::weight_backward; }
  constexpr bool has_weight_gradient() const { return kind != OpKind::forward && kind != OpKind::input_backward; }
  friend constexpr bool operator==(const Op&, const Op&) = default;
};
using Order = std::vector<Op>;

/// What travels between stages: an activation from the stage that made it to the next, a gradient to the previous.
enum class Payload : unsigned char { activation, gradient };
struct Boundary {
  Payload payload = Payload::activation;
  int stage = 0;  ///< that makes it
  int micro_batch = 0;
  friend constexpr bool operator==(const Boundary&, const Boundary&) = default;
};
struct Transfer {
  Boundary what;
  int peer = 0;
  bool is_send = false;
};
/// Transfers that a rank takes part in at once, before its op `before` (the number of ops: after the last).
struct Batch {
  int before = 0;
  std::vector<Transfer> transfers;
};
struct Program {
  Order ops;
  std::vector<Batch> batches;  ///< by ascending `before`
};

/// Which rank holds which stage. One chunk per rank: stage r on rank r. Two chunks lie as a V, r and 2 * ranks - 1 - r,
/// so that the first rank has the first and the last stage, and the turn in the middle needs no transfer.
struct Placement {
  int ranks = 1;
  int chunks_per_rank = 1;

  /// Stages of the model; the stage of a rank's chunk; the chunk that a stage is.
  constexpr int stages() const { return ranks * chunks_per_rank; }
  constexpr int stage(int rank, int chunk) const { return chunk == 0 ? rank : stages() - 1 - rank; }
  constexpr int chunk_of(int stage) const { return stage < ranks ? 0 : 1; }
  constexpr int rank_of(int stage) const { return stage < ranks ? stage : stages() - 1 - stage; }
  /// The stage that uses `what`.
  constexpr int consumer(const Boundary& what) const {
    return what.payload == Payload::activation ? what.stage + 1 : what.stage - 1;
  }
  constexpr bool exists(const Boundary& what) const {
    const int user = consumer(what);
    return what.stage >= 0 && what.stage < stages() && user >= 0 && user < stages();
  }
  constexpr bool travels(const Boundary& what) const {
    return exists(what) && rank_of(what.stage) != rank_of(consumer(what));
  }
};

/// The same on every rank. `programs` [ranks].
struct Schedule {
  Placement placement;
  int micro_batches = 0;
  std::vector<Program> programs;
  const char* name = "custom";

  /// A number for each boundary tensor: below `boundaries()`, unique.
  constexpr int index(const Boundary& what) const {
    const int kind = what.payload == Payload::activation ? 0 : 1;
    return (kind * placement.stages() + what.stage) * micro_batches + what.micro_batch;
  }
  constexpr int boundaries() const { return 2 * placement.stages() * micro_batches; }
};

/// Calls `f(Boundary)` for what the op of `rank` needs from other stages: at most two.
template <class F>
constexpr void for_each_input(const Placement& placement, int rank, const Op& op, F&& f) {
  const auto visit = [&](const Boundary& what) {
    if (placement.exists(what)) f(what);
  };
  if (op.has_forward()) {
    visit({Payload::activation, placement.stage(rank, op.forward.chunk) - 1, op.forward.micro_batch});
  }
  if (op.has_input_gradient()) {
    visit({Payload::gradient, placement.stage(rank, op.backward.chunk) + 1, op.backward.micro_batch});
  }
}
/// Calls `f(Boundary)` for what the op of `rank` makes for other stages: at most two.
template <class F>
constexpr void for_each_output(const Placement& placement, int rank, const Op& op, F&& f) {
  const auto visit = [&](const Boundary& what) {
    if (placement.exists(what)) f(what);
  };
  if (op.has_forward()) {
    visit({Payload::activation, placement.stage(rank, op.forward.chunk), op.forward.micro_batch});
  }
  if (op.has_input_gradient()) {
    visit({Payload::gradient, placement.stage(rank, op.backward.chunk), op.backward.micro_batch});
  }
}

constexpr void append_to(Message& text, const Part& part) {
  text.append(part.chunk).append('.').append(part.micro_batch);
}
/// "F0.3", "B1.2", "b1.2", "W1.2" or "F0.3&B1.2": chunk, then micro-batch; b is the input's gradient alone.
constexpr void append_to(Message& text, const Op& op) {
  if (op.has_forward()) append_to(text.append('F'), op.forward);
  if (op.kind == OpKind::forward) return;
  if (op.kind == OpKind::overlapped) text.append('&');
  append_to(text.append(op.kind == OpKind::input_backward    ? 'b'
                        : op.kind == OpKind::weight_backward ? 'W'
                                                             : 'B'),
            op.backward);
}
constexpr void append_to(Message& text, const Boundary& what) {
  text.append(what.payload == Payload::activation ? "the activation" : "the gradient")
      .append(" that stage ")
      .append(what.stage)
      .append(" makes of micro-batch ")
      .append(what.micro_batch);
}

/// The layers of each stage, in order: as equal as can be; what is left over goes to the inner stages in order, then to
/// the first, then to the last, which hold the embedding and the head. Errors: shape_error P07.
PLEAT_VECTOR_CONSTEXPR std::vector<int> layers_of_stages(int layers, int stages) {
  if (stages < 1 || layers < stages) {
    fail<shape_error>("pleat[P07]: ", layers, " layers cannot fill ", stages,
                      " stages; valid: from 1 to as many stages as there are layers");
  }
  std::vector<int> result(static_cast<std::size_t>(stages), layers / stages);
  int left = layers % stages;
  for (int s = 1; s + 1 < stages && left > 0; ++s, --left) ++result[static_cast<std::size_t>(s)];
  if (left > 0) ++result.front(), --left;
  if (left > 0) ++result.back();
  return result;
}

}  // namespace pleat::inline v0::pipeline
