// The orders of computation that schedules are made of: one list of operations per rank, without transfers.
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>

#include <pleat/pipeline/schedule.hpp>

namespace pleat::inline v0::pipeline::detail {

/// Appends operations, and counts per chunk which micro-batch is next.
class OrderWriter {
 public:
  PLEAT_VECTOR_CONSTEXPR void forward(int chunk) { order_.push_back({OpKind::forward, next_forward(chunk), {}}); }
  PLEAT_VECTOR_CONSTEXPR void backward(int chunk) { order_.push_back({OpKind::backward, {}, next_backward(chunk)}); }
  PLEAT_VECTOR_CONSTEXPR void input_backward(int chunk) {
    deferred_.push_back(next_backward(chunk));
    order_.push_back({OpKind::input_backward, {}, deferred_.back()});
  }
  /// Of the oldest input_backward that has none.
  PLEAT_VECTOR_CONSTEXPR void weight_backward() { order_.push_back({OpKind::weight_backward, {}, deferred_[done_++]}); }
  PLEAT_VECTOR_CONSTEXPR void overlapped(int forward_chunk, int backward_chunk) {
    const Part f = next_forward(forward_chunk);
    order_.push_back({OpKind::overlapped, f, next_backward(backward_chunk)});
  }

  PLEAT_VECTOR_CONSTEXPR int forwards(int chunk) const { return forwards_[chunk]; }
  PLEAT_VECTOR_CONSTEXPR int backwards(int chunk) const { return backwards_[chunk]; }
  PLEAT_VECTOR_CONSTEXPR int deferred() const { return static_cast<int>(deferred_.size() - done_); }
  PLEAT_VECTOR_CONSTEXPR Order finish() { return std::move(order_); }

 private:
  PLEAT_VECTOR_CONSTEXPR Part next_forward(int chunk) { return {chunk, forwards_[chunk]++}; }
  PLEAT_VECTOR_CONSTEXPR Part next_backward(int chunk) { return {chunk, backwards_[chunk]++}; }

  Order order_;
  std::vector<Part> deferred_;
  std::size_t done_ = 0;
  int forwards_[2] = {};
  int backwards_[2] = {};
};

/// One forward, one backward. source: PipeDream-Flush, arXiv 2006.09503.
PLEAT_VECTOR_CONSTEXPR Order one_f_one_b(int rank, int ranks, int micro_batches) {
  OrderWriter write;
  const int ahead = std::min(micro_batches, ranks - 1 - rank);
  for (int i = 0; i < ahead; ++i) write.forward(0);
  for (int i = ahead; i < micro_batches; ++i) {
    write.forward(0);
    write.backward(0);
  }
  for (int i = 0; i < ahead; ++i) write.backward(0);
  return write.finish();
}

/// One forward beside one backward: each rank is as far ahead as a micro-batch takes to the last rank and back, one
/// pair per rank on either way, so that all of its steady state is pairs, on one rank too. source: DeepSeek-V3, arXiv
/// 2412.19437, where they hide the experts' communication.
PLEAT_VECTOR_CONSTEXPR Order one_f_one_b_pairs(int rank, int ranks, int micro_batches) {
  OrderWriter write;
  const int ahead = std::min(micro_batches, 2 * (ranks - rank) - 1);
  for (int i = 0; i < ahead; ++i) write.forward(0);
  for (int i = ahead; i < micro_batches; ++i) write.overlapped(0, 0);
  for (int i = 0; i < ahead; ++i) write.backward(0);
  return write.finish();
}

/// DualPipe cut in half: a V of two chunks per rank, whose steady state pairs the forward of one micro-batch with the
/// backward of another. source: github.com/deepseek-ai/DualPipe, DualPipeV.
PLEAT_VECTOR_CONSTEXPR Order dualpipe_v(int rank, int ranks, int micro_batches) {
  OrderWriter write;
  const int later = ranks - 1 - rank;  // ranks behind this one
  const int sooner = rank + 1;         // this one and those before
  for (int i = 0; i < 2 * later; ++i) write.forward(0);
  for (int i = 0; i < sooner; ++i) {
    write.forward(0);
    write.forward(1);
  }
  for (int i = 0; i < later; ++i) {
    write.input_backward(1);
    write.weight_backward();
    write.forward(1);
  }
  for (int i = 0; i < micro_batches - 2 * ranks + sooner; ++i) {
    if (i == 0 && later == 0) {
      write.forward(0);  // the last rank's first backward needs the forward before it
      write.backward(1);
    } else {
      write.overlapped(0, 1);
    }
    write.overlapped(1, 0);
  }
  for (int i = 0; i < later; ++i) {
    write.backward(1);
    write.overlapped(1, 0);
  }
  // The second half of the drain lets weight gradients wait, so that input gradients travel on: from an input gradient
  // of chunk 1 on odd ranks, of chunk 0 on even ones.
  for (int i = 0; i < sooner; ++i) {
    const bool odd = rank % 2 == 1;
    const int half = sooner / 2;
    i > half || (i == half && odd) ? write.input_backward(1) : write.backward(1);
    i >= half ? write.input_backward(0) : write.backward(0);
  }
  for (int i = 0; i < later; ++i) {
    write.weight_backward();
    write.input_backward(0);
  }
  while (write.deferred() > 0) write.weight_backward();
  return write.finish();
}

/// Plays one V of ranks in steps of equal length, each rank choosing what is most urgent: input gradients, then the
/// forward of chunk 1, then of chunk 0, and weight gradients in what would be bubbles. A rank never holds more than
/// 2 * ranks activations, nor, with what its deferred weight gradients keep, more than `spare` above that.
class ZeroBubbleGame {
 public:
  PLEAT_VECTOR_CONSTEXPR ZeroBubbleGame(int ranks, int micro_batches, int spare0, int spare1)
      : placement_{ranks, 2},
        micro_batches_(micro_batches),
        spare_{spare0, spare1},
        writers_(static_cast<std::size_t>(ranks), OrderWriter{}),
        forward_done_(static_cast<std::size_t>(2 * ranks * micro_batches), never),
        backward_done_(forward_done_) {}

  /// The number of steps; `never` when no rank may do anything.
  PLEAT_VECTOR_CONSTEXPR int play() {
    const int ranks = placement_.ranks;
    int left = 6 * ranks * micro_batches_;
    std::vector<Choice> choices(static_cast<std::size_t>(ranks), Choice::nothing);
    int step = 0;
    for (; left > 0; ++step) {
      const int before = left;
      for (int r = 0; r < ranks; ++r) choices[static_cast<std::size_t>(r)] = choose(r, step);
      for (int r = 0; r < ranks; ++r) left -= act(r, choices[static_cast<std::size_t>(r)], step);
      if (left == before) return never;  // every step ends what it begins: nothing will change
    }
    return step;
  }
  PLEAT_VECTOR_CONSTEXPR std::vector<Order> finish() {
    std::vector<Order> orders;
    for (OrderWriter& writer : writers_) orders.push_back(writer.finish());
    return orders;
  }

  static constexpr int never = 1 << 30;

 private:
  enum class Choice : unsigned char { nothing, forward0, forward1, backward0, backward1, weight };

  PLEAT_VECTOR_CONSTEXPR int& at(std::vector<int>& done, int stage, int micro_batch) {
    return done[static_cast<std::size_t>(stage) * static_cast<std::size_t>(micro_batches_) +
                static_cast<std::size_t>(micro_batch)];
  }
  PLEAT_VECTOR_CONSTEXPR bool can_forward(const OrderWriter& w, int rank, int chunk, int step) {
    const int i = w.forwards(chunk), stage = placement_.stage(rank, chunk);
    const int live = w.forwards(0) + w.forwards(1) - w.backwards(0) - w.backwards(1);
    const int most = 2 * placement_.ranks;
    return i < micro_batches_ && (stage == 0 || at(forward_done_, stage - 1, i) <= step) && live < most &&
           live + w.deferred() < most + spare_[chunk];
  }
  PLEAT_VECTOR_CONSTEXPR bool can_backward(const OrderWriter& w, int rank, int chunk, int step) {
    const int i = w.backwards(chunk), stage = placement_.stage(rank, chunk);
    return i < w.forwards(chunk) && (stage == placement_.stages() - 1 || at(backward_done_, stage + 1, i) <= step);
  }
  PLEAT_VECTOR_CONSTEXPR Choice choose(int rank, int step) {
    const OrderWriter& w = writers_[static_cast<std::size_t>(rank)];
    if (can_backward(w, rank, 1, step)) return Choice::backward1;
    if (can_backward(w, rank, 0, step)) return Choice::backward0;
    if (can_forward(w, rank, 1, step)) return Choice::forward1;
    // More than the V's round trip ahead would only hold memory.
    const bool is_near = w.forwards(0) - w.forwards(1) < 2 * (placement_.ranks - rank) - 1;
    if (is_near && can_forward(w, rank, 0, step)) return Choice::forward0;
    return w.deferred() > 0 ? Choice::weight : Choice::nothing;
  }
  PLEAT_VECTOR_CONSTEXPR int act(int rank, Choice choice, int step) {
    OrderWriter& w = writers_[static_cast<std::size_t>(rank)];
    switch (choice) {
      case Choice::nothing:
        return 0;
      case Choice::forward0:
      case Choice::forward1: {
        const int chunk = choice == Choice::forward1 ? 1 : 0;
        at(forward_done_, placement_.stage(rank, chunk), w.forwards(chunk)) = step + 1;
        w.forward(chunk);
        return 1;
      }
      case Choice::backward0:
      case Choice::backward1: {
        const int chunk = choice == Choice::backward1 ? 1 : 0;
        at(backward_done_, placement_.stage(rank, chunk), w.backwards(chunk)) = step + 1;
        w.input_backward(chunk);
        return 1;
      }
      case Choice::weight:
        w.weight_backward();
        return 1;
    }
    return 0;
  }

  Placement placement_;
  int micro_batches_;
  int spare_[2];
  std::vector<OrderWriter> writers_;
  std::vector<int> forward_done_, backward_done_;
};

/// Zero bubble on a V of two chunks per rank: of the games from the least memory up, the first without a bubble but the
/// ranks - 1 steps that the first micro-batch takes; else the shortest. source: Pipeline Parallelism with Controllable
/// Memory, arXiv 2405.15362.
PLEAT_VECTOR_CONSTEXPR std::vector<Order> zb_v(int ranks, int micro_batches) {
  const int shortest = 6 * micro_batches + ranks - 1;
  int best_steps = ZeroBubbleGame::never;
  std::vector<Order> best;
  for (int i = 0; i < 2 * ranks && best_steps > shortest; ++i) {
    ZeroBubbleGame game(ranks, micro_batches, (i + 1) / 2 - 1, i / 2);
    const int steps = game.play();
    if (steps < best_steps) {
      best_steps = steps;
      best = game.finish();
    }
  }
  return best;
}

}  // namespace pleat::inline v0::pipeline::detail
