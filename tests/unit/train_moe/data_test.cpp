// The data map: dp decides which sequences a rank reads, the zigzag which of their tokens; labels are the next byte.
#include <algorithm>
#include <map>
#include <set>
#include <span>

#include <doctest/doctest.h>

#include "small_run.hpp"

using namespace train_moe;

TEST_CASE("every token of a global batch is read by exactly one rank, and labels are the next byte of the text") {
  const TextFile file(24 * 40 + 1);
  for (const char* mesh : {"pp1-dp1-cp1-ep1", "pp1-dp2-cp3-ep2", "pp1-dp4-cp2-ep8"}) {
    CAPTURE(mesh);
    const Options o = options_of({"--text", file.name().c_str(), "--mesh", mesh, "--seq", "24", "--batch", "8",
                                  "--micro-batch", "1", "--experts", "8"});
    const Text text(o.text, o.sequence, o.batch);
    for (const int step : {0, 1, 7}) {
      std::set<std::pair<std::int64_t, std::int32_t>> read;  // (sample of the step, position)
      for (int rank = 0; rank < o.mesh.world_size; ++rank) {
        const pleat::Coordinate me = o.mesh.coordinate(rank);
        const DataMap data(text, o, o.mesh.dp, me.dp, o.mesh.cp, me.cp);
        for (int acc = 0; acc < o.micro_batches(); ++acc) {
          const MicroBatch batch = data.micro_batch(step * o.batch, acc);
          CHECK(batch.tokens.size() == static_cast<std::size_t>(data.streams() * data.local_tokens(0)));
          for (std::size_t t = 0; t < batch.tokens.size(); ++t) {
            const std::int64_t in_micro = batch.global[t] / o.sequence;
            // sample step * gbs + dp_rank * mbs + acc * (mbs * dp) + off
            CHECK(in_micro / o.micro_batch == me.dp);
            const std::int64_t in_step = in_micro + acc * o.micro_batch * o.mesh.dp;
            CHECK(read.insert({in_step, batch.positions[t]}).second);
            const std::int64_t sample = (step * o.batch + in_step) % text.sequences();
            CHECK(batch.tokens[t] == text.at(0, sample * o.sequence + batch.positions[t]));
            CHECK(batch.labels[t] == text.at(0, sample * o.sequence + batch.positions[t] + 1));
          }
        }
      }
      CHECK(read.size() == static_cast<std::size_t>(o.batch * o.sequence));
    }
  }
}

TEST_CASE("packed and ragged: the same tokens, documents and targets on every mesh") {
  const TextFile file(64 * 40 + 1);
  struct Token {
    int token, label, position;
    auto operator<=>(const Token&) const = default;
  };
  using Read = std::map<std::pair<int, std::int64_t>, Token>;  // (micro-batch, number of the token in it)
  const auto read = [&](const char* mesh, const char* micro_batch, pleat::moe::StepTokens& sums, double& pairs) {
    const Options o = options_of({"--text", file.name().c_str(), "--mesh", mesh, "--seq", "64", "--batch", "16",
                                  "--micro-batch", micro_batch, "--experts", "8", "--packed", "--ragged"});
    const Text text(o.text, o.sequence, o.batch);
    Read tokens;
    for (int rank = 0; rank < o.mesh.world_size; ++rank) {
      const pleat::Coordinate me = o.mesh.coordinate(rank);
      const DataMap data(text, o, o.mesh.dp, me.dp, o.mesh.cp, me.cp);
      for (int acc = 0; acc < o.micro_batches(); ++acc) {
        const MicroBatch batch = data.micro_batch(16, acc);
        const auto ends = std::span(batch.cu_seqlens).subspan(1);
        CHECK(ends.size() <= static_cast<std::size_t>(data.most_documents()));
        CHECK(ends.back() == data.stream_tokens(batch.length));
        CHECK(batch.rows() == data.local_tokens(batch.length));
        for (std::size_t t = 0; t < batch.tokens.size(); ++t) {
          const Token token{batch.tokens[t], batch.labels[t], batch.positions[t]};
          CHECK(tokens.emplace(std::pair(acc, batch.global[t]), token).second);
        }
      }
      sums = data.step_tokens(16);
      pairs = data.step_pairs(16);
    }
    return tokens;
  };
  pleat::moe::StepTokens one_sums, sums;
  double one_pairs = 0, pairs = 0, seen = 0;
  const Read one = read("pp1-dp1-cp1-ep1", "4", one_sums, one_pairs);
  for (const auto& [where, token] : one) seen += token.position + 1;  // a token sees those before it and itself
  CHECK(seen == one_pairs);
  CHECK(one.size() == one_sums.routed);
  CHECK(one.size() < 16 * 64);
  CHECK(std::count_if(one.begin(), one.end(), [](const auto& t) { return t.second.label >= 0; }) == one_sums.targets);
  CHECK(std::count_if(one.begin(), one.end(), [](const auto& t) { return t.second.position == 0; }) ==
        one_sums.routed - one_sums.targets);  // the last of each document has no target
  CHECK(read("pp1-dp2-cp3-ep2", "2", sums, pairs) == one);
  CHECK(read("pp1-dp4-cp2-ep8", "1", sums, pairs) == one);
  CHECK(sums.targets == one_sums.targets);
  CHECK(pairs == one_pairs);
}

TEST_CASE("a text of less than one global batch is refused with the bytes that are needed") {
  const TextFile file(8 * 24);  // one byte too few: the last label is missing
  CHECK_THROWS_WITH_AS(Text(file.name(), 24, 8), doctest::Contains("at least 193 bytes"), usage_error);
  CHECK_THROWS_WITH_AS(Text(file.name(), 24, 8), doctest::Contains("a step reads 8:"), usage_error);
  CHECK_THROWS_WITH_AS(Text(".", 24, 8), "--text . is a directory; name a file", usage_error);
  CHECK_THROWS_WITH_AS(Text("no such file", 24, 8), doctest::Contains("cannot be read"), usage_error);
}
