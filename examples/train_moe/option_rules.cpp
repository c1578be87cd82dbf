// Deriving and checking options.
#include "option_rules.hpp"

#include <algorithm>
#include <optional>

#include <pleat/checkpoint/folder.hpp>
#include <pleat/mesh/text.hpp>
#include <pleat/pipeline/generate.hpp>

namespace train_moe {
namespace {

void require(bool holds, const std::string& text) {
  if (!holds) throw usage_error(text);
}
std::string divisors(long long n) {
  return pleat::message_of(pleat::Divisors{n}).c_str();
}
std::string text(long long n) {
  return std::to_string(n);
}
/// "1 sequence", "3 sequences".
std::string counted(int n, const std::string& one, const std::string& many) {
  return text(n) + " " + (n == 1 ? one : many);
}

void check_mesh(const pleat::RuntimeMesh& mesh) {
  require(mesh.world_size <= most_ranks, "--mesh: a world of " + text(mesh.world_size) +
                                             " ranks; each is a thread of this program: valid: up to " +
                                             text(most_ranks));
}

void derive_model(ModelShape& m) {
  if (m.heads == 0) m.heads = m.hidden < 16 ? 1 : m.hidden / 16;
  if (m.kv_heads == 0) m.kv_heads = m.heads % 2 == 0 ? m.heads / 2 : m.heads;
  if (m.inner == 0) m.inner = m.hidden < 2 ? 1 : m.hidden / 2;
  if (m.dense_inner == 0) m.dense_inner = 2 * m.hidden;
  require(m.heads % m.kv_heads == 0, "--kv-heads " + text(m.kv_heads) + " does not divide the number of heads, " +
                                         text(m.heads) + "; valid: " + divisors(m.heads));
  require(m.head_dim % 2 == 0, "--head-dim " + text(m.head_dim) +
                                   " is odd; rotary positions need pairs: valid: 2 4 6 .. " + text(most_head_dim));
  require(m.rope_dim % 2 == 0, "--rope-dim " + text(m.rope_dim) +
                                   " is odd; rotary positions need pairs: valid: 2 4 6 .. " + text(most_head_dim));
  require(m.dense_layers <= m.layers, "--dense-layers " + text(m.dense_layers) + " is more than --layers " +
                                          text(m.layers) + "; valid: 0 to " + text(m.layers));
  require(m.top_k <= m.experts, "--top-k " + text(m.top_k) + " is more than --experts " + text(m.experts) +
                                    "; valid: 1 to " + text(m.experts));
}

/// Where neither is given, a step is one sequence of every data rank; the texts name only what was given.
void derive_batch(Options& o) {
  const int dp = o.mesh.dp;
  if (o.batch == 0) {
    o.batch = std::max(1, o.micro_batch) * dp;
  } else {
    require(o.batch % dp == 0, "--batch " + text(o.batch) + " is not divisible by dp=" + text(dp) +
                                   "; valid: " + text(dp) + " " + text(2 * dp) + " ..");
  }
  const int of_rank = o.batch / dp;
  if (o.micro_batch == 0) o.micro_batch = of_rank;
  require(of_rank % o.micro_batch == 0, "--micro-batch " + text(o.micro_batch) + " does not divide batch / dp = " +
                                            text(of_rank) + "; valid: " + divisors(of_rank));
  const long long tokens = static_cast<long long>(o.batch) * o.sequence;
  require(tokens <= most_step_tokens, "a step of " + counted(o.batch, "sequence", "sequences") + " of " +
                                          counted(o.sequence, "token", "tokens") + " has " + text(tokens) +
                                          " tokens; valid: up to " + text(most_step_tokens));
}

/// Lengths must be cut in 2 * cp equal chunks, where no packing takes any.
void check_lengths(const Options& o) {
  const int lengths = o.ragged ? 4 : 1;
  if (o.packed) {
    require(o.sequence >= 4, "--seq " + text(o.sequence) +
                                 " with --packed: documents of one token each leave nothing to predict; valid: 4 or "
                                 "more");
    require(o.sequence % lengths == 0, "--seq " + text(o.sequence) + " is not divisible by 4, which --ragged needs");
    require(o.balance != pleat::moe::BalanceScope::sequence,
            "--balance sequence with --packed: a stream of documents is no sequence; valid: none micro global");
    return;
  }
  pleat::zigzag_chunk_tokens(o.mesh, o.sequence);
  const int chunks = 2 * o.mesh.cp * lengths;
  require(!o.ragged || o.sequence % chunks == 0, "--seq " + text(o.sequence) +
                                                     " with --ragged is not divisible by 4 * 2 * cp = " + text(chunks) +
                                                     "; valid: " + text(chunks) + " " + text(2LL * chunks) + " ..");
}

void check_pipeline(const Options& o) {
  try {
    const auto schedule = pleat::pipeline::make_schedule(o.kind(), o.mesh.pp, o.micro_batches());
    pleat::pipeline::layers_of_stages(o.model.layers, schedule.placement.stages());
  } catch (const pleat::shape_error& e) {
    throw usage_error(std::string("--schedule: ") + e.what());
  }
}

/// What would be known only after the last step. That there is nothing to load is found where it is loaded.
void check_checkpoints(const Options& o) {
  namespace ck = pleat::checkpoint;
  const std::int64_t start = o.load.empty() ? 0 : ck::latest(o.load).value_or(0);
  const std::int64_t least = start + (o.save.empty() ? 1 : 0);  // without a step a run may save for another mesh
  require(o.steps >= least, "--load " + o.load + " has step " + text(start) + ", so no step is left of --steps " +
                                text(o.steps) + "; valid: " + text(least) + " or more");
  if (o.save.empty()) return;
  for (const std::int64_t step : ck::steps(o.save)) {
    const bool is_reached = step > start && step < o.steps && o.every > 0 && step % o.every == 0;
    require(!is_reached && step != o.steps, "--save " + o.save + ": there is a checkpoint " +
                                                ck::step_folder(o.save, step) +
                                                ", which this run would save; remove it first, or name another folder");
  }
}

void check_files(const Options& o) {
  require(o.every == 0 || !o.save.empty(), "--every says how often --save does; name its folder");
  require(!o.check || o.load.empty(), "--check follows a run from its first step; leave --load out");
  check_checkpoints(o);
}

void check_failure(const Options& o) {
  require(o.fail_rank < o.mesh.world_size,
          "--fail-rank " + text(o.fail_rank) + " is no rank; valid: 0 to " + text(o.mesh.world_size - 1));
  require(o.fail_rank < 0 || o.fail_step <= o.steps,
          "--fail-step " + text(o.fail_step) + " is no step; valid: 1 to " + text(o.steps));
}

}  // namespace

void derive_and_check(Options& o) {
  check_mesh(o.mesh);
  derive_model(o.model);
  pleat::experts_per_rank(o.mesh, o.model.experts);
  derive_batch(o);
  check_lengths(o);
  check_pipeline(o);
  check_files(o);
  check_failure(o);
}

std::string work_text(const Options& o) {
  return counted(o.mesh.world_size, "rank", "ranks") + ", " +
         counted(o.micro_batches(), "micro-batch", "micro-batches") + " of " +
         counted(o.micro_batch, "sequence", "sequences") + " of " + counted(o.sequence, "token", "tokens") +
         " a step on each of " + counted(o.mesh.dp, "data rank", "data ranks");
}

}  // namespace train_moe
