// The text, and the map that says which of its bytes a rank reads.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <pleat/attention/zigzag.hpp>
#include <pleat/moe/step_tokens.hpp>

#include "options.hpp"

namespace train_moe {

/// A text as bytes, cut into whole sequences; sequence i is bytes [i * tokens, i * tokens + tokens], the last of which
/// is only a label.
class Text {
 public:
  /// Errors: usage_error when the file is a directory, cannot be read or holds less than one global batch.
  Text(const std::string& file, int sequence, int batch);

  std::int64_t sequences() const { return sequences_; }
  /// Byte `position` of sample `sample`, which wraps around. `position == sequence` is the label of the last token.
  std::uint8_t at(std::int64_t sample, std::int64_t position) const {
    return bytes_[static_cast<std::size_t>(sample % sequences_ * sequence_ + position)];
  }

 private:
  std::vector<std::uint8_t> bytes_;
  std::int64_t sequence_;
  std::int64_t sequences_ = 0;
};

/// What one rank reads in one micro-batch, in its local order: the zigzag's of every sequence, or of the one stream
/// that packed sequences make one after the other.
struct MicroBatch {
  std::int64_t first = 0;                // sample that the step begins with
  int accumulation = 0;                  // which micro-batch of the step
  int length = 0;                        // which of the lengths there are
  std::vector<std::int32_t> tokens;      // [streams, local]
  std::vector<std::int32_t> labels;      // [streams, local]; -1: no target
  std::vector<std::int32_t> positions;   // [streams, local], in the document
  std::vector<std::int64_t> global;      // [streams, local], number of the token in the micro-batch of all ranks
  std::vector<std::int64_t> cu_seqlens;  // boundaries of the documents of a stream

  std::int64_t rows() const { return static_cast<std::int64_t>(tokens.size()); }
};

/// Row k of a step's local batch is sample first + acc * (micro * dp) + dp_rank * micro + off, (acc, off) = divmod(k,
/// micro): dp alone decides what a rank reads. Labels are the stream shifted by one, read from the text, so that the
/// borders of chunks lose nothing. Lengths and documents depend on the samples' numbers alone.
class DataMap {
 public:
  DataMap(const Text& text, const Options& options, int dp, int dp_rank, int cp, int cp_rank);

  /// Lengths of sequences that micro-batches may have, descending.
  const std::vector<std::int64_t>& lengths() const { return lengths_; }
  /// Sequences of a micro-batch, and the streams that attention sees of them.
  int sequences() const { return micro_batch_; }
  int streams() const { return packed_ ? 1 : micro_batch_; }
  std::int64_t stream_tokens(int length) const {
    return lengths_[static_cast<std::size_t>(length)] * (micro_batch_ / streams());
  }
  /// This rank's tokens of a stream.
  std::int64_t local_tokens(int length) const { return local(stream_tokens(length)).tokens(); }
  /// The most documents that a stream holds.
  std::int64_t most_documents() const { return packed_ ? micro_batch_ * documents_per_sequence : 1; }

  /// Micro-batch `accumulation` of the step that begins with sample `first`.
  MicroBatch micro_batch(std::int64_t first, int accumulation) const;
  /// Of the step that begins with sample `first`, on all ranks.
  pleat::moe::StepTokens step_tokens(std::int64_t first) const;
  /// The pairs of a query and a key that it sees.
  double step_pairs(std::int64_t first) const;

 private:
  static constexpr std::int64_t documents_per_sequence = 16;

  int length_of(std::int64_t first, int accumulation) const;
  /// Calls f(length, ends of its documents) for every sample of a step.
  template <class F>
  void for_each_sample(std::int64_t first, F f) const;
  /// Where the documents of a sample of `length` tokens end, ascending.
  std::vector<std::int64_t> documents(std::int64_t sample, std::int64_t length) const;
  pleat::TokenSpans local(std::int64_t tokens) const { return pleat::zigzag_spans(tokens, cp_, cp_rank_); }

  const Text* text_;
  std::vector<std::int64_t> lengths_;
  bool packed_;
  int micro_batches_;
  int micro_batch_;
  int dp_, dp_rank_, cp_, cp_rank_;
};

}  // namespace train_moe
