// The command line of train_moe: every option with its default, its help and its check.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

#include <pleat/comm/peer_access.hpp>
#include <pleat/core/dtype.hpp>
#include <pleat/fsdp/layout.hpp>
#include <pleat/mesh.hpp>
#include <pleat/moe/losses.hpp>
#include <pleat/pipeline/schedule.hpp>

#include "ops.hpp"

namespace train_moe {

/// Bad input: the program prints it and exits with 2.
class usage_error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The sizes of a byte-level transformer; 0 means "derived from others".
struct ModelShape {
  int layers = 4;
  int hidden = 64;
  int heads = 0;     // hidden / 16
  int kv_heads = 0;  // heads / 2; of grouped-query attention, as head_dim
  int head_dim = 16;
  int lora = 0;       // width of the latent of keys and values; 0: grouped-query attention
  int nope_dim = 16;  // of a key made of the latent; with the rotated part behind it
  int rope_dim = 8;
  int value_dim = 16;
  int experts = 16;
  int top_k = 2;
  int inner = 0;         // of one expert; hidden / 2
  int shared = 0;        // experts that every token takes
  int dense_layers = 0;  // at the beginning, without experts
  int dense_inner = 0;   // of those; 2 * hidden
  int vocabulary = 256;
  bool renormalize = true;  // the weights of a token's experts
  double rope_theta = 1e6;
  double epsilon = 1e-6;

  bool has_latents() const { return lora > 0; }
  LatentShape latents() const { return {heads, nope_dim, rope_dim, value_dim, lora}; }
  bool routes(int layer) const { return layer >= dense_layers; }
  /// Width of the MLP that all tokens of a layer take; 0 for none.
  int mlp_inner(int layer) const { return routes(layer) ? shared * inner : dense_inner; }
  std::int64_t queries() const {
    return static_cast<std::int64_t>(heads) * (has_latents() ? nope_dim + rope_dim : head_dim);
  }
  std::int64_t keys() const { return static_cast<std::int64_t>(kv_heads) * head_dim; }
  std::int64_t attended() const { return static_cast<std::int64_t>(heads) * (has_latents() ? value_dim : head_dim); }
};

struct Options {
  pleat::RuntimeMesh mesh;
  std::string text;
  ModelShape model;
  int steps = 32;
  int sequence = 128;
  int batch = 0;                                  // sequences of a step over all data ranks; 0: dp
  int micro_batch = 0;                            // sequences of a micro-batch on one data rank; 0: batch / dp
  bool packed = false;                            // several documents in a sequence
  bool ragged = false;                            // micro-batches of several lengths
  std::optional<pleat::pipeline::Kind> schedule;  // by default 1f1b without a pipeline, else zb-v
  pleat::DType dtype = pleat::DType::f64;
  pleat::fsdp::Optimizer optimizer = pleat::fsdp::Optimizer::adamw;  // of matrices in the middle
  double learning_rate = 1e-3;
  double muon_rate = 2e-2;
  double warmup_from = 1e-6;
  int warmup_steps = 10;
  double clip = 1.0;
  double weight_decay = 0.1;
  double balance_alpha = 1e-3;
  std::optional<pleat::moe::BalanceScope> balance = pleat::moe::BalanceScope::global_batch;
  bool force_balance = false;
  double capacity = 0;  // of a rank's experts, in multiples of a balanced routing; 0: any routing
  pleat::Transport transport = pleat::Transport::peer;
  bool loopback = false;  // of experts' rows
  int prefetch = 1;
  std::uint64_t seed = 1;
  bool perturb = false;  // initial parameters, by a unit in the last place
  std::string save, load;
  int every = 0;  // steps between saves, beside that of the last; 0: it alone
  bool check = false;
  bool runtime_mesh = false;
  bool quiet = false;
  std::string json;
  std::string times;
  double peak_tflops = 0;  // of a rank's device; 0: not known
  bool log_routing = false;
  int fail_rank = -1;
  int fail_step = 1;

  int micro_batches() const { return batch / (micro_batch * mesh.dp); }
  pleat::pipeline::Kind kind() const {
    using pleat::pipeline::Kind;
    return schedule.value_or(mesh.pp == 1 ? Kind::one_f_one_b : Kind::zb_v);
  }
};

/// Parses and checks the command line, and derives what was not given. `help` is set when the help was asked for.
/// Errors: usage_error with the values and the valid choices; pleat::mesh_error for a bad mesh.
Options parse_options(int argc, const char* const* argv, bool& help);

/// The text of --help.
std::string help_text();

/// What every step reads, as one line: "4 ranks, 2 micro-batches of 1 sequence of 128 tokens a step on each of ..".
std::string work_text(const Options& options);

}  // namespace train_moe
