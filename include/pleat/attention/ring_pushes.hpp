// The ring's peer transport: the owner of a block pushes what a reader needs into the reader's slot.
#pragma once

#include <pleat/attention/ring_side.hpp>

namespace pleat::inline v0::ring::detail {

/// See RingSide for what the members mean. No transfer of keys and values depends on an earlier one, and only the keys
/// that the reader's work needs travel.
///
/// Signals are credits. The slot of step s is written by owner(s) and read by this rank; two steps later owner(s + 2)
/// writes it. The reader signals *free* to exactly the rank that writes next, so there is one credit per (writer,
/// reader) and call; at bind for steps 1 and 2. The slots of sums are written by the previous rank at steps 2 .. cp and
/// by this rank itself at step 1, which needs no credit: order on its own streams is enough.
/// No deadlock: every wait for step s is for what a peer does at a step before s, or in the call before.
///
/// What is gathered for one launch has memory and credits of its own: a signal to every peer per group of heads, and
/// one back at the end. All of a rank's copies are enqueued before its kernel that waits, which the signals on the
/// flags of `Peers::next_signal` set free, as streams are; what awaits them on the stream follows the kernel.
template <executor Executor, peer_access Peers>
class RingPushes : public RingSide<Executor> {
  using Base = RingSide<Executor>;
  using Base::slot_of, Base::owner, Base::cp, Base::rank_, Base::work_, Base::executor_, Base::slots_, Base::plan_;
  enum Channel : int { block_free, block_full, first_of_sums, gathered_free = step_channels, first_gathered_full };
  /// Kernels may wait where a signal is a flag in memory, and peers' streams run on.
  static constexpr bool kernels_wait = requires(const Peers& p) { p.next_signal(0, 0).word; };
  // A slot of sums has credits of its own: sums of two steps may be under way to the same rank.
  static constexpr int sum_free(int step) { return first_of_sums + 3 * slot_of(step); }
  static constexpr int sum_full(int step, int slice) { return sum_free(step) + 1 + slice; }

 public:
  using typename Base::StreamPair;

  RingPushes(std::shared_ptr<const Plan> plan, const Executor& executor, Peers peers, typename Base::stream_type s)
      : Base(plan, executor, peers.rank(), slots_at(*plan, peers, peers.rank())),
        peers_(std::move(peers)),
        groups_(head_groups(*plan)),
        computed_(executor.make_event()) {
    for (int peer = 0; peer < cp(); ++peer) peer_slots_.push_back(slots_at(*plan_, peers_, peer));
    for (int step = 1; step <= std::min(Slots::count, cp() - 1); ++step) {
      peers_.signal(plan_->work.owner(rank_, step), block_free, s);
    }
    peers_.signal(this->previous(), sum_free(2), s);
    if (plan_->launches == Launches::one) pleat::detail::signal_peers(peers_, gathered_free, s);
  }

  void post(int step, const StreamPair& s) {
    const int reader = work_->reader(rank_, step);
    peers_.await(reader, block_free, s.comm);
    for (std::size_t i = 0; i < work_->parts(reader, step).size(); ++i) {
      this->copy(part_in(slots_of(reader), reader, step, i), rows_of(this->own_, work_->parts(reader, step)[i].keys),
                 s.comm);
    }
    peers_.signal(reader, block_full, s.comm);
  }
  void arrive(int step, const StreamPair& s) { peers_.await(owner(step), block_full, s.compute); }
  KeyValueBlock part(int step, TokenSpan keys) const {
    std::size_t index = 0;
    while (work_->parts(rank_, step)[index].keys.end < keys.end) ++index;
    const std::int64_t first = work_->parts(rank_, step)[index].keys.begin;
    return rows_of(part_in(slots_, rank_, step, index), {keys.begin - first, keys.end - first});
  }
  void release(int step, const StreamPair& s) {
    const int after_next = step + Slots::count;
    peers_.signal(owner(after_next < cp() ? after_next : first_with_slot_of(step)), block_free, s.compute);
  }

  void gather(const StreamPair& s) {
    pleat::detail::await_peers(peers_, gathered_free, s.comm);
    for (int group = 0; group < groups_.count; ++group) {
      for (int step = 1; step < cp(); ++step) {
        const int reader = work_->reader(rank_, step);
        const KeyValueBlock to = heads_of(gathered_in(slots_of(reader)), groups_[group]);
        const KeyValueBlock from = heads_of(this->own_, groups_[group]);
        for (const BlockWork& part : work_->parts(reader, step)) {
          this->copy(rows_of(to, rows_of_step(part.keys, step)), rows_of(from, part.keys), s.comm);
        }
      }
      pleat::detail::signal_peers(peers_, first_gathered_full + group, s.comm);
    }
  }
  Arrivals arrivals(const StreamPair& s) {
    Arrivals arrivals;
    if constexpr (kernels_wait) {
      for (int step = 1; step < cp(); ++step) {
        const auto signal = peers_.next_signal(owner(step), first_gathered_full);
        arrivals.words[step - 1] = signal.word;
        arrivals.at_least = signal.at_least;  // all flags have as many signals
      }
      arrivals.word_stride = peers_.words_per_channel();
      arrivals.heads_per_word = groups_.heads_each;
    } else {
      await_gathered(s);
    }
    return arrivals;
  }
  KeyValueBlock gathered() const { return gathered_in(slots_); }
  KeyValueBlock gathered_part(int step, TokenSpan keys) const { return rows_of(gathered(), rows_of_step(keys, step)); }
  void end_arrivals(const StreamPair& s) {
    if constexpr (kernels_wait) await_gathered(s);
  }
  void release_gathered(const StreamPair& s) { pleat::detail::signal_peers(peers_, gathered_free, s.compute); }

  KeyValueBlock sums(int step) const { return this->sums_in(slots_, step, owner(step)); }
  void arrive_sums(int step, int slice, const StreamPair& s) {
    if (step > 1) peers_.await(this->previous(), sum_full(step, slice), s.compute);
  }
  void pass(int step, int slice, const StreamPair& s) {
    executor_.record(computed_, s.compute);
    executor_.wait(s.comm, computed_);
    const KeyValueBlock to = this->sums_in(slots_of(this->next()), step + 1, owner(step)), from = sums(step);
    if (slice == 0) peers_.await(this->next(), sum_free(step + 1), s.comm);
    for (const TokenSpan& run : work_->summed_keys(owner(step), step)) {
      const TokenSpan rows = intersection(run, work_->slice(owner(step), slice));
      this->copy(rows_of(to, rows), rows_of(from, rows), s.comm);
    }
    peers_.signal(this->next(), sum_full(step + 1, slice), s.comm);
    if (slice + 1 == work_->slices()) free_sums(step, s.comm);
  }
  void drop_sums(const StreamPair& s) { free_sums(cp(), s.compute); }

 private:
  static Slots slots_at(const Plan& plan, const Peers& peers, int peer) {
    Carver memory(Block{peers.base(peer), plan.footprint().symmetric});
    return take_slots(memory, plan);
  }
  const Slots& slots_of(int peer) const { return peer_slots_[static_cast<std::size_t>(peer)]; }
  /// The keys of a part in the slot of `reader`, where parts lie one after the other.
  KeyValueBlock part_in(const Slots& slots, int reader, int step, std::size_t index) const {
    const std::int64_t begin = work_->rows_before(reader, step, index);
    return rows_of(this->block_in(slots, step, work_->travelling_rows(reader, step)),
                   {begin, begin + work_->parts(reader, step)[index].keys.size()});
  }
  KeyValueBlock gathered_in(const Slots& slots) const {
    return block_of(slots.gathered, *plan_, (cp() - 1) * work_->block_rows(), plan_->shape.dtype, executor_.device());
  }
  TokenSpan rows_of_step(TokenSpan keys, int step) const {
    return {work_->first_row(step) + keys.begin, work_->first_row(step) + keys.end};
  }
  void await_gathered(const StreamPair& s) {
    for (int group = 0; group < groups_.count; ++group) {
      pleat::detail::await_peers(peers_, first_gathered_full + group, s.compute);
    }
  }
  static constexpr int first_with_slot_of(int step) {
    return step % Slots::count == 0 ? Slots::count : step % Slots::count;
  }

  /// The slot of `step` is next written by the previous rank, unless the next to write it is step 1 of the next call.
  void free_sums(int step, typename Base::stream_type s) {
    if (step + Slots::count <= cp() || first_with_slot_of(step) > 1) peers_.signal(this->previous(), sum_free(step), s);
  }

  Peers peers_;
  std::vector<Slots> peer_slots_;
  HeadGroups groups_;
  typename Base::Event computed_;  // compute: the sum that is passed next is complete
};

}  // namespace pleat::inline v0::ring::detail
