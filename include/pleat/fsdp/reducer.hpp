// The reduce half of a Sharder: units of gradients, what of them was written, and their sums into the shards.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <pleat/comm/ordered_sum.hpp>
#include <pleat/fsdp/shard_state.hpp>

namespace pleat::inline v0::fsdp {

/// Where a kernel puts a gradient, and how: NEVER the tensor alone. Where `accumulate` is true, the kernel must add to
/// all elements, else overwrite them all: a kernel that always overwrites, or zeroes and then adds, gives wrong sums
/// from a second micro-batch on, which nothing can tell. What is there then was written before in the micro-batch or,
/// on a rank alone (Plan::writes_shards), before in the step. Take both at once, and give the second to the kernel (a
/// product's beta):
///
///     const auto [dw, accumulate] = gradients.write(param);
///
/// Kernels that only add take `add_to` in its place. Until `reduce` of the unit: what is written there later is lost,
/// or ends up in another sum, and nothing can tell that either.
struct GradientTarget {
  TensorRef tensor;
  bool accumulate;
};

/// The gradients of one unit while they are written; borrowed, until `reduce` of the unit. What nobody writes counts as
/// zero. Errors of its calls: shape_error F11 for writing a frozen parameter, F13 for a parameter or an expert that the
/// unit does not have, F21 for writing after `reduce` of the unit, or after its gradients were discarded.
template <executor Executor>
class GradientView {
 public:
  using stream_type = typename Executor::stream_type;

  /// `closings`: how often gradients of the unit were reduced or discarded, which ends the view.
  GradientView(const UnitView& view, std::span<char> written, const std::int64_t& closings, Executor executor,
               stream_type s)
      : view_(view),
        written_(written),
        closings_(&closings),
        closings_before_(closings),
        executor_(executor),
        stream_(s) {}

  /// Whether `param` has a gradient: it is not frozen.
  bool trains(int param) const {
    detail::check_param(view_.unit(), view_.layout(), param);
    return !view_.layout().place(param).spec.frozen;
  }
  /// The gradient of `param`, laid out as UnitView's; the caller promises to write it all, in the order of the compute
  /// stream, and to ADD to what is there where `accumulate` says so: see GradientTarget. Zeroes nothing that was
  /// written.
  [[nodiscard]] GradientTarget write(int param) {
    const std::span<char> flags = flags_of(param);
    const bool any = std::find(flags.begin(), flags.end(), 1) != flags.end();
    for (std::size_t e = 0; any && e < flags.size(); ++e) {
      if (!flags[e]) zero(param, static_cast<std::int64_t>(e));
    }
    std::fill(flags.begin(), flags.end(), char{1});
    return {view_[param], any};
  }
  /// The same for one local expert.
  [[nodiscard]] GradientTarget write(int param, std::int64_t expert) {
    const std::span<char> flags = flags_of(param);
    detail::check_expert(view_.unit(), view_.layout(), expert);
    char& flag = flags[static_cast<std::size_t>(expert)];
    const bool accumulate = flag != 0;
    flag = 1;
    return {view_.expert(param, expert), accumulate};
  }
  /// The gradient of `param` for kernels that only add: zero, by work on the compute stream, or what `write` would
  /// accumulate to. Not to be zeroed by the caller.
  [[nodiscard]] TensorRef add_to(int param) {
    const std::span<char> flags = flags_of(param);
    for (std::size_t e = 0; e < flags.size(); ++e) {
      if (!flags[e]) zero(param, static_cast<std::int64_t>(e));
    }
    std::fill(flags.begin(), flags.end(), char{1});
    return view_[param];
  }

 private:
  std::span<char> flags_of(int param) const {
    const UnitLayout& layout = view_.layout();
    if (!trains(param)) {
      fail<shape_error>("pleat[F11]: parameter ", layout.place(param).spec.name, " of unit ", view_.unit(),
                        " is frozen and has no gradient; write only where the view's trains(param) holds");
    }
    if (*closings_ != closings_before_) {
      fail<shape_error>("pleat[F21]: the gradients of unit ", view_.unit(),
                        " were reduced or discarded after this view of them was made; call gradient() for a new one");
    }
    const auto blocks = static_cast<std::size_t>(layout.block_count());
    return written_.subspan(static_cast<std::size_t>(layout.storage_of(param)) * blocks, blocks);
  }
  void zero(int param, std::int64_t expert) const {
    const TensorRef tensor = view_.expert(param, expert);
    executor_.zero(tensor.data(), static_cast<std::size_t>(tensor.elems()) * size_bytes(tensor.dtype()), stream_);
  }

  UnitView view_;
  std::span<char> written_;  // [parameter][expert]
  const std::int64_t* closings_;
  std::int64_t closings_before_;
  Executor executor_;
  stream_type stream_;
};

/// What Sharder's calls `gradient`, `reduce`, `finish_gradients`, `discard_gradients`, `fork` and `join` do.
template <executor Executor, communicator Comm>
class Reducer {
 public:
  using stream_type = typename Executor::stream_type;

  Reducer(ShardState<Executor>& state, GroupComm<Comm> replica)
      : state_(&state),
        replica_(replica),
        finished_(state.executor.make_event()),
        read_(state.executor.make_event()),
        open_(state.plan.layouts.size(), closed),
        writers_(state.plan.layouts.size()),
        closings_(state.plan.layouts.size()),
        summed_(state.plan.layouts.size()) {
    for (const Param kind : {Param::dense, Param::expert}) {
      for (int i = 0; i < state.plan.of(kind).gradient_units; ++i) {
        buffers_.push_back({kind, i, state.executor.make_event(), state.executor.make_event()});
      }
    }
    for (std::size_t u = 0; u < open_.size(); ++u) {
      const UnitLayout& layout = state.plan.layouts[u];
      ranges_.push_back(trainable_ranges(layout, state.pieces[u]));
      written_.emplace_back(layout.params.size() * static_cast<std::size_t>(layout.block_count()));
      shard_written_.push_back(state.executor.make_event());
    }
    terms_.resize(static_cast<std::size_t>(std::max(state.plan.sizes.dense, state.plan.sizes.expert)));
  }

  /// See Sharder::gradient.
  GradientView<Executor> gradient(int unit, const ShardStreams<stream_type>& streams) {
    state_->check_unit(unit);
    std::byte* const base = state_->layout(unit).trains() ? opened(unit, streams.compute) : nullptr;
    const auto u = static_cast<std::size_t>(unit);
    return {state_->view(unit, base, state_->plan.gradient), written_[u], closings_[u], state_->executor,
            streams.compute};
  }

  /// On at most `ctas` multiprocessors.
  void reduce(int unit, const ShardStreams<stream_type>& streams, int ctas) {
    state_->check_unit(unit);
    if (!state_->layout(unit).trains()) return;
    zero_unwritten(unit, opened(unit, streams.compute), streams.compute);
    const int at = std::exchange(open_[static_cast<std::size_t>(unit)], closed);
    ++closings_[static_cast<std::size_t>(unit)];
    if (at == in_shard) {
      state_->executor.record(shard_written_[static_cast<std::size_t>(unit)], streams.compute);
      summed_[static_cast<std::size_t>(unit)] = true;
      return;
    }
    Buffer& buffer = buffers_[static_cast<std::size_t>(at)];
    UnitTransport<Executor>& transport = state_->transport(buffer.kind);
    transport.ready(buffer.index, unit, streams.compute);
    state_->executor.record(buffer.written, streams.compute);
    state_->executor.wait(streams.reduce, buffer.written);
    add(unit, transport.terms(buffer.index, unit, streams.reduce), ctas, streams.reduce);
    transport.release(buffer.index, streams.reduce);
    state_->executor.record(buffer.summed, streams.reduce);
    buffer.unit = -1;
    buffer.travels = true;
  }

  /// Ends a step: shards without a sum are zero, replicas are added, `compute` sees the result, and the next sums start
  /// anew.
  void finish(const ShardStreams<stream_type>& streams) {
    const auto open = std::find_if(open_.begin(), open_.end(), [](int at) { return at != closed; });
    if (open != open_.end()) {
      fail<shape_error>("pleat[F21]: the step ends, but the gradients of unit ",
                        state_->name(static_cast<int>(open - open_.begin())),
                        " were not reduced since gradient(); call reduce() for it first, or discard_gradients()");
    }
    // Nothing was reduced, and `compute` may still read the shards of the step before.
    state_->executor.record(finished_, streams.compute);
    state_->executor.wait(streams.reduce, finished_);
    await_reader(streams.reduce);
    for (std::size_t u = 0; u < open_.size(); ++u) {
      const ShardMemory& shard = state_->shards[u];
      if (shard.gradient == nullptr) continue;
      const auto elems = static_cast<std::size_t>(shard.elems);
      state_->executor.wait(streams.reduce, shard_written_[u]);
      if (!summed_[u]) state_->executor.zero(shard.gradient, elems * size_bytes(shard.master_dtype), streams.reduce);
      summed_[u] = false;
      const Block workspace{state_->workspace, state_->plan.workspace_bytes()};
      all_reduce_ordered(replica_, shard.gradient, elems, shard.master_dtype, workspace, streams.reduce);
    }
    state_->executor.record(finished_, streams.reduce);
    state_->executor.wait(streams.compute, finished_);
    reader_ = streams.compute;
  }
  /// What `finish` has left in the shards was read, as far as its compute stream is now.
  void end_reads() {
    if (reader_) state_->executor.record(read_, *reader_);
    reader_.reset();
  }

  /// Gradients that are being written, and what was summed in this step, are as if they had never been.
  void discard() {
    for (std::size_t u = 0; u < open_.size(); ++u) {
      const int at = std::exchange(open_[u], closed);
      if (at == closed) continue;
      Buffer* const buffer = at == in_shard ? nullptr : &buffers_[static_cast<std::size_t>(at)];
      // The work that writes them may be under way.
      state_->executor.record(buffer == nullptr ? shard_written_[u] : buffer->written, *writers_[u]);
      if (buffer == nullptr) continue;
      buffer->unit = -1;
      buffer->is_left = true;
    }
    // A rank that took a buffer may be ahead of one that had nothing to write.
    turns_ = {};
    for (std::int64_t& closings : closings_) ++closings;
    std::fill(summed_.begin(), summed_.end(), char{0});
  }

  /// See Sharder.
  void fork(const ShardStreams<stream_type>& streams) {
    const bool is_written = std::any_of(open_.begin(), open_.end(), [](int at) { return at != closed; });
    if (is_written || std::any_of(buffers_.begin(), buffers_.end(), [](const Buffer& b) { return b.travels; })) {
      state_->fail_fork();
    }
    for (Buffer& buffer : buffers_) buffer.is_left = false;
    reader_.reset();
    state_->executor.record(read_, streams.compute);
    for (event_type& written : shard_written_) state_->executor.record(written, streams.compute);
    state_->executor.record(finished_, streams.compute);
    state_->executor.wait(streams.reduce, finished_);
  }
  void join(const ShardStreams<stream_type>& streams) {
    for (Buffer& buffer : buffers_) {
      if (buffer.travels || buffer.is_left) arrive(buffer, streams.compute);
    }
    for (const event_type& written : shard_written_) state_->executor.wait(streams.compute, written);
    state_->executor.record(finished_, streams.reduce);
    state_->executor.wait(streams.compute, finished_);
  }

 private:
  using leaf = core_leaf<typename Executor::device_type>;
  using event_type = typename Executor::event_type;

  struct Buffer {
    Param kind;
    int index;           // of its kind
    event_type written;  // by compute
    event_type summed;   // on this rank
    int unit = -1;
    bool travels = false;  // peers may still read it
    bool is_left = false;  // discarded; what was enqueued before `written` may still write it
  };

  std::byte* bytes_of(const Buffer& buffer) const {
    return state_->transport(buffer.kind).buffers().gradients[static_cast<std::size_t>(buffer.index)];
  }

  /// Where the unit's gradients are written: the shard itself, behind what was written there on any stream, or a buffer
  /// that nobody writes, the one reduced longest ago.
  std::byte* opened(int unit, stream_type compute) {
    int& at = open_[static_cast<std::size_t>(unit)];
    if (at == closed) {
      const auto u = static_cast<std::size_t>(unit);
      const bool is_alone = state_->plan.writes_shards(state_->kind(unit));
      at = is_alone ? in_shard : take(state_->kind(unit), unit, compute);
      writers_[u] = compute;
      if (is_alone) state_->executor.wait(compute, shard_written_[u]);
      if (is_alone && !summed_[u]) await_reader(compute);
      std::fill(written_[u].begin(), written_[u].end(), static_cast<char>(is_alone && summed_[u]));
    }
    if (at == in_shard) return static_cast<std::byte*>(state_->shard(unit).gradient);
    return bytes_of(buffers_[static_cast<std::size_t>(at)]);
  }
  /// What follows on `s` may write gradient shards: whoever reads the sums of the step before is done.
  void await_reader(stream_type s) {
    end_reads();
    state_->executor.wait(s, read_);
  }
  /// What follows on `compute` may write the buffer: it is summed here, no peer reads it, and nobody writes it.
  void arrive(Buffer& buffer, stream_type compute) {
    if (buffer.travels) {
      state_->transport(buffer.kind).await_released(buffer.index, compute);
      state_->executor.wait(compute, buffer.summed);
    }
    if (buffer.is_left) state_->executor.wait(compute, buffer.written);
    buffer.travels = buffer.is_left = false;
  }
  /// In turn, so that all ranks take the same and the one taken was reduced longest ago; from the first one on after
  /// `discard`.
  int take(Param kind, int unit, stream_type compute) {
    int& turn = turns_[static_cast<std::size_t>(kind)];
    const int count = state_->plan.of(kind).gradient_units;
    for (int tried = 0; tried < count; ++tried) {
      const int index = turn;
      turn = (turn + 1) % count;
      for (std::size_t b = 0; b < buffers_.size(); ++b) {
        Buffer& buffer = buffers_[b];
        if (buffer.kind != kind || buffer.index != index || buffer.unit >= 0) continue;
        buffer.unit = unit;
        arrive(buffer, compute);
        return static_cast<int>(b);
      }
    }
    fail<shape_error>("pleat[F12]: the gradients of unit ", state_->name(unit), " have no buffer: all ", count,
                      " of its kind are being written; reduce a unit first");
  }
  void zero_unwritten(int unit, std::byte* base, stream_type s) {
    const UnitLayout& layout = state_->layout(unit);
    const std::size_t width = size_bytes(state_->plan.gradient);
    const std::vector<char>& written = written_[static_cast<std::size_t>(unit)];
    layout.for_each_segment([&](int p, std::int64_t expert, std::int64_t begin) {
      if (layout.place(p).spec.frozen || written[static_cast<std::size_t>(p * layout.block_count() + expert)]) return;
      state_->executor.zero(base + static_cast<std::size_t>(begin) * width,
                            static_cast<std::size_t>(layout.place(p).elems) * width, s);
    });
  }
  void add(int unit, std::span<const void* const> terms, int ctas, stream_type s) {
    const ShardMemory& shard = state_->shard(unit);
    const DType gradient = state_->plan.gradient;
    const auto u = static_cast<std::size_t>(unit);
    if (!summed_[u]) await_reader(s);
    // A rank alone adds what is in its own memory, which a few multiprocessors are far too slow for.
    if (terms.size() == 1) ctas = 0;
    for (const Range& range : ranges_[u]) {
      const auto begin = static_cast<std::size_t>(range.begin);
      for (std::size_t r = 0; r < terms.size(); ++r) {
        terms_[r] = static_cast<const std::byte*>(terms[r]) + begin * size_bytes(gradient);
      }
      leaf::sum_ranks(static_cast<std::byte*>(shard.gradient) + begin * size_bytes(shard.master_dtype),
                      shard.master_dtype, std::span(terms_).first(terms.size()), gradient,
                      static_cast<std::size_t>(range.elems), summed_[u], s, ctas);
    }
    summed_[u] = true;
  }

  ShardState<Executor>* state_;
  GroupComm<Comm> replica_;
  std::vector<Buffer> buffers_;
  std::array<int, 2> turns_{};
  event_type finished_;
  event_type read_;                    // the sums of the step before, by whoever reads them
  std::optional<stream_type> reader_;  // of the last finish, until its reads have ended
  static constexpr int closed = -1, in_shard = -2;
  std::vector<int> open_;                            // [unit]: closed, in_shard or its buffer
  std::vector<std::optional<stream_type>> writers_;  // [unit]: the stream on which its gradients were opened
  std::vector<std::int64_t> closings_;               // [unit]: how often it was closed; ends views
  std::vector<char> summed_;                         // [unit]: its gradient shard holds a sum of this step
  std::vector<event_type> shard_written_;            // [unit]: by compute, where gradients are written in shards
  std::vector<std::vector<char>> written_;           // [unit][parameter][expert]
  std::vector<std::vector<Range>> ranges_;           // [unit]: what is summed of its shard
  std::vector<const void*> terms_;
};

}  // namespace pleat::inline v0::fsdp
