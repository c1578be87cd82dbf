// The command line of train_moe: every option with its default, its help and its check.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include <pleat/comm/peer_access.hpp>
#include <pleat/core/dtype.hpp>
#include <pleat/mesh.hpp>

namespace train_moe {

/// Bad input: the program prints it and exits with 2.
class usage_error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The sizes of a qwen3-shaped byte-level transformer; 0 means "derived from hidden".
struct ModelShape {
  int layers = 4;
  int hidden = 64;
  int heads = 0;     // hidden / 16
  int kv_heads = 0;  // heads / 2
  int head_dim = 16;
  int experts = 16;
  int top_k = 2;
  int inner = 0;  // of one expert; hidden / 2
  int vocabulary = 256;
  double rope_theta = 1e6;
  double epsilon = 1e-6;
};

enum class LoadBalance : unsigned char { none, micro_batch, global_batch, sequence };

struct Options {
  pleat::RuntimeMesh mesh;
  std::string text;
  ModelShape model;
  int steps = 32;
  int sequence = 128;
  int batch = 0;        // sequences of a step over all data ranks; 0: dp
  int micro_batch = 0;  // sequences of a micro-batch on one data rank; 0: batch / dp
  pleat::DType dtype = pleat::DType::f64;
  double learning_rate = 1e-3;
  double warmup_from = 1e-6;
  int warmup_steps = 10;
  double clip = 1.0;
  double weight_decay = 0.1;
  double balance_alpha = 1e-3;
  LoadBalance balance = LoadBalance::global_batch;
  pleat::Transport transport = pleat::Transport::peer;
  int prefetch = 1;
  std::uint64_t seed = 1;
  bool check = false;
  bool runtime_mesh = false;
  bool quiet = false;
  std::string json;
  int fail_rank = -1;
  int fail_step = 1;

  int micro_batches() const { return batch / (micro_batch * mesh.dp); }
};

/// Parses and checks the command line, and derives what was not given. `help` is set when the help was asked for.
/// Errors: usage_error with the values and the valid choices; pleat::mesh_error for a bad mesh.
Options parse_options(int argc, const char* const* argv, bool& help);

/// The text of --help.
std::string help_text();

/// What every step reads, as one line: "4 ranks, 2 micro-batches of 1 sequence of 128 tokens a step on each of ..".
std::string work_text(const Options& options);

}  // namespace train_moe
