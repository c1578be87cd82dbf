// The text, and the map that says which of its bytes a rank reads.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <pleat/attention/zigzag.hpp>

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

/// What one rank reads in one micro-batch: its own tokens of every sequence, in the zigzag's local order.
struct MicroBatch {
  int accumulation = 0;                 // which micro-batch of the step
  std::vector<std::int32_t> tokens;     // [sequences, local]
  std::vector<std::int32_t> labels;     // [sequences, local]
  std::vector<std::int32_t> positions;  // [sequences, local], in the sequence
  std::vector<std::int64_t> global;     // [sequences, local], number of the token in the micro-batch of all ranks
};

/// Row k of a step's local batch is sample step * batch + dp_rank * micro + acc * (micro * dp) + off, (acc, off) =
/// divmod(k, micro): dp alone decides what a rank reads. Labels are the stream shifted by one, read from the text, so
/// that the borders of chunks lose nothing.
class DataMap {
 public:
  DataMap(const Text& text, const Options& options, int dp, int dp_rank, int cp, int cp_rank)
      : text_(&text),
        sequence_(options.sequence),
        batch_(options.batch),
        micro_batch_(options.batch / options.micro_batches() / dp),
        dp_(dp),
        dp_rank_(dp_rank) {
    const pleat::TokenSpans mine = pleat::zigzag_spans(sequence_, cp, cp_rank);
    for (std::int64_t i = 0; i < mine.tokens(); ++i) positions_.push_back(static_cast<std::int32_t>(mine.position(i)));
  }

  int sequences() const { return micro_batch_; }
  std::int64_t local_tokens() const { return static_cast<std::int64_t>(positions_.size()); }

  MicroBatch micro_batch(int step, int accumulation) const {
    MicroBatch out;
    out.accumulation = accumulation;
    for (int off = 0; off < micro_batch_; ++off) {
      const std::int64_t in_micro = static_cast<std::int64_t>(dp_rank_) * micro_batch_ + off;
      const std::int64_t sample = static_cast<std::int64_t>(step) * batch_ +
                                  static_cast<std::int64_t>(accumulation) * micro_batch_ * dp_ + in_micro;
      for (const std::int32_t p : positions_) {
        out.tokens.push_back(text_->at(sample, p));
        out.labels.push_back(text_->at(sample, p + 1));
        out.positions.push_back(p);
        out.global.push_back(in_micro * sequence_ + p);
      }
    }
    return out;
  }

 private:
  const Text* text_;
  std::int64_t sequence_;
  int batch_;
  int micro_batch_;
  int dp_;
  int dp_rank_;
  std::vector<std::int32_t> positions_;
};

}  // namespace train_moe
