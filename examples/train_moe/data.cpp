// Reading the text, and cutting it.
#include "data.hpp"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>

namespace train_moe {
namespace {
/// A number that looks drawn and depends on these two alone.
std::uint64_t drawn(std::int64_t a, std::int64_t b) {
  std::uint64_t z = static_cast<std::uint64_t>(a) * 0x9e3779b97f4a7c15u + static_cast<std::uint64_t>(b) + 1;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}
}  // namespace

Text::Text(const std::string& file, int sequence, int batch) : sequence_(sequence) {
  std::error_code unknown;
  if (std::filesystem::is_directory(file, unknown)) {
    throw usage_error("--text " + file + " is a directory; name a file");
  }
  std::ifstream in(file, std::ios::binary);
  if (!in) throw usage_error("--text " + file + " cannot be read; name a file");
  bytes_.assign(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
  const auto bytes = static_cast<std::int64_t>(bytes_.size());
  sequences_ = bytes == 0 ? 0 : (bytes - 1) / sequence;
  if (sequences_ < batch) {
    const std::int64_t needed = static_cast<std::int64_t>(batch) * sequence + 1;
    throw usage_error("--text " + file + " holds " + std::to_string(bytes) + " bytes, " + std::to_string(sequences_) +
                      " whole sequences of " + std::to_string(sequence) + "; a step reads " + std::to_string(batch) +
                      ": give a text of at least " + std::to_string(needed) + " bytes, or fewer or shorter sequences");
  }
}

DataMap::DataMap(const Text& text, const Options& o, int dp, int dp_rank, int cp, int cp_rank)
    : text_(&text),
      lengths_{o.sequence},
      packed_(o.packed),
      micro_batches_(o.micro_batches()),
      micro_batch_(o.batch / micro_batches_ / dp),
      dp_(dp),
      dp_rank_(dp_rank),
      cp_(cp),
      cp_rank_(cp_rank) {
  if (o.ragged) lengths_ = {o.sequence, o.sequence / 4 * 3, o.sequence / 2};
}

int DataMap::length_of(std::int64_t first, int accumulation) const {
  return static_cast<int>(drawn(first, accumulation) % lengths_.size());
}

std::vector<std::int64_t> DataMap::documents(std::int64_t sample, std::int64_t length) const {
  if (!packed_) return {length};
  const std::int64_t shortest = std::max<std::int64_t>(1, length / 8), longest = std::max<std::int64_t>(1, length / 2);
  std::vector<std::int64_t> ends;
  for (std::int64_t end = 0; end < length;) {
    const auto spread = static_cast<std::uint64_t>(longest - shortest + 1);
    end = std::min(length, end + shortest + static_cast<std::int64_t>(drawn(sample, end) % spread));
    ends.push_back(end);
  }
  return ends;
}

template <class F>
void DataMap::for_each_sample(std::int64_t first, F f) const {
  const int samples = micro_batch_ * dp_;
  for (int i = 0; i < micro_batches_; ++i) {
    const std::int64_t length = lengths_[static_cast<std::size_t>(length_of(first, i))];
    for (int k = 0; k < samples; ++k) {
      f(length, documents(first + static_cast<std::int64_t>(i) * samples + k, length));
    }
  }
}

pleat::moe::StepTokens DataMap::step_tokens(std::int64_t first) const {
  pleat::moe::StepTokens sum;
  for_each_sample(first, [&](std::int64_t length, const std::vector<std::int64_t>& ends) {
    sum.routed += static_cast<double>(length);
    sum.targets += static_cast<double>(length) - (packed_ ? static_cast<double>(ends.size()) : 0);
  });
  return sum;
}

double DataMap::step_pairs(std::int64_t first) const {
  double pairs = 0;
  for_each_sample(first, [&](std::int64_t, const std::vector<std::int64_t>& ends) {
    std::int64_t begin = 0;
    for (const std::int64_t end : ends) {
      const auto length = static_cast<double>(end - begin);
      pairs += length * (length + 1) / 2;
      begin = end;
    }
  });
  return pairs;
}

MicroBatch DataMap::micro_batch(std::int64_t first, int accumulation) const {
  MicroBatch out;
  out.first = first;
  out.accumulation = accumulation;
  out.length = length_of(first, accumulation);
  out.cu_seqlens = {0};
  const std::int64_t length = lengths_[static_cast<std::size_t>(out.length)];
  const std::int64_t tokens = stream_tokens(out.length), per_stream = tokens / length;
  const pleat::TokenSpans mine = local(tokens);
  if (!packed_) out.cu_seqlens.push_back(length);
  for (int stream = 0; stream < streams(); ++stream) {
    std::int64_t cursor = 0;  // local tokens ascend
    for (std::int64_t k = 0; k < per_stream; ++k) {
      const std::int64_t in_micro = static_cast<std::int64_t>(dp_rank_) * micro_batch_ + stream * per_stream + k;
      const std::int64_t sample = first + static_cast<std::int64_t>(accumulation) * micro_batch_ * dp_ + in_micro;
      std::int64_t begin = 0;
      for (const std::int64_t end : documents(sample, length)) {
        if (packed_) out.cu_seqlens.push_back(k * length + end);
        for (; cursor < mine.tokens() && mine.position(cursor) < k * length + end; ++cursor) {
          const std::int64_t p = mine.position(cursor) - k * length;
          const bool is_last = packed_ && p + 1 == end;
          out.tokens.push_back(text_->at(sample, p));
          out.labels.push_back(is_last ? -1 : text_->at(sample, p + 1));
          out.positions.push_back(static_cast<std::int32_t>(p - begin));
          out.global.push_back(in_micro * length + p);
        }
        begin = end;
      }
    }
  }
  return out;
}

}  // namespace train_moe
