// A transport of the ring that moves nothing: what the same rectangles take without one.
#pragma once

#include <pleat/attention/ring.hpp>

namespace ring_attention_bench {

/// Every block is the own one.
class NoTransfers {
 public:
  NoTransfers(const pleat::ring::KeyValueBlock& sums, const pleat::ring::KeyValueBlock& gathered)
      : sums_(sums), gathered_(gathered) {}
  using StreamPair = pleat::Streams<cudaStream_t>;
  void open(const pleat::ring::Work&, const pleat::ring::KeyValueBlock& own, const StreamPair&) { own_ = own; }
  void post(int, const StreamPair&) {}
  void arrive(int, const StreamPair&) {}
  pleat::ring::KeyValueBlock part(int, pleat::TokenSpan keys) const { return pleat::ring::detail::rows_of(own_, keys); }
  void release(int, const StreamPair&) {}
  pleat::ring::KeyValueBlock sums(int) const { return sums_; }
  void arrive_sums(int, int, const StreamPair&) {}
  void pass(int, int, const StreamPair&) {}
  void drop_sums(const StreamPair&) {}
  void close(const StreamPair&) {}

  void gather(const StreamPair&) {}
  pleat::Arrivals arrivals(const StreamPair&) const { return {}; }
  pleat::ring::KeyValueBlock gathered() const { return gathered_; }
  pleat::ring::KeyValueBlock gathered_part(int step, pleat::TokenSpan keys) const { return part(step, keys); }
  void end_arrivals(const StreamPair&) {}
  void release_gathered(const StreamPair&) {}

 private:
  pleat::ring::KeyValueBlock sums_, gathered_, own_;
};

}  // namespace ring_attention_bench
