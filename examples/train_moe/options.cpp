// Parsing and checking the command line.
#include "options.hpp"

#include <charconv>
#include <functional>
#include <sstream>
#include <vector>

#include <pleat/mesh/text.hpp>

namespace train_moe {
namespace {

template <class Number>
Number parse_number(const std::string& flag, const std::string& text) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size()) {
    throw usage_error(flag + " needs a number; it was given '" + text + "'");
  }
  return value;
}

template <class Value>
struct Choice {
  const char* name;
  Value value;
};
template <class Value>
Value parse_choice(const std::string& flag, const std::string& text, std::initializer_list<Choice<Value>> choices) {
  std::string valid;
  for (const auto& choice : choices) {
    if (text == choice.name) return choice.value;
    valid += std::string(" ") + choice.name;
  }
  throw usage_error(flag + " " + text + " is unknown; valid:" + valid);
}

/// One flag: its name, what it takes (empty for a switch), its help, and what it sets.
struct Flag {
  std::string name;
  std::string takes;
  std::string help;
  std::function<void(const std::string&)> set;
};

std::vector<Flag> flags_of(Options& o) {
  const auto number = [](auto& target, const std::string& name, const std::string& help) {
    using Number = std::remove_reference_t<decltype(target)>;
    std::ostringstream text;
    text << help << " (default " << target << ")";
    return Flag{name, "N", text.str(),
                [&target, name](const std::string& v) { target = parse_number<Number>(name, v); }};
  };
  const auto toggle = [](bool& target, const std::string& name, const std::string& help) {
    return Flag{name, "", help, [&target](const std::string&) { target = true; }};
  };
  ModelShape& m = o.model;
  return {
      {"--mesh", "MESH", "ranks, as pp1-dp8-cp4-ep8 or with replicas pp1-dp4-cp4-ep4-r2 (default pp1-dp1-cp1-ep1)",
       [&](const std::string& v) { o.mesh = pleat::parse_mesh(v); }},
      {"--text", "FILE", "the text to train on, read as bytes (default: the project's LICENSE)",
       [&](const std::string& v) { o.text = v; }},
      number(o.steps, "--steps", "optimizer steps"),
      number(o.sequence, "--seq", "tokens of a sequence"),
      {"--batch", "N", "sequences of a step, over all data ranks (default dp)",
       [&](const std::string& v) { o.batch = parse_number<int>("--batch", v); }},
      {"--micro-batch", "N", "sequences of a micro-batch on one data rank (default batch / dp)",
       [&](const std::string& v) { o.micro_batch = parse_number<int>("--micro-batch", v); }},
      number(m.layers, "--layers", "transformer layers"),
      number(m.hidden, "--hidden", "model width"),
      {"--heads", "N", "query heads (default hidden / 16)",
       [&](const std::string& v) { m.heads = parse_number<int>("--heads", v); }},
      {"--kv-heads", "N", "key and value heads (default heads / 2)",
       [&](const std::string& v) { m.kv_heads = parse_number<int>("--kv-heads", v); }},
      number(m.head_dim, "--head-dim", "width of a head"),
      number(m.experts, "--experts", "routed experts of a layer"),
      number(m.top_k, "--top-k", "experts of a token"),
      {"--inner", "N", "inner width of an expert (default hidden / 2)",
       [&](const std::string& v) { m.inner = parse_number<int>("--inner", v); }},
      {"--dtype", "f64|f32", "parameters and activations (default f64)",
       [&](const std::string& v) {
         o.dtype = parse_choice<pleat::DType>("--dtype", v, {{"f64", pleat::DType::f64}, {"f32", pleat::DType::f32}});
       }},
      number(o.learning_rate, "--lr", "learning rate after warm-up"),
      number(o.warmup_from, "--warmup-from", "learning rate of the first step"),
      number(o.warmup_steps, "--warmup", "steps of linear warm-up"),
      number(o.clip, "--clip", "largest gradient norm, 0 for none"),
      number(o.weight_decay, "--weight-decay", "decay of matrices"),
      {"--balance", "KIND", "load-balance loss: none, micro, global (batch), sequence (default global)",
       [&](const std::string& v) {
         o.balance = parse_choice<LoadBalance>("--balance", v,
                                               {{"none", LoadBalance::none},
                                                {"micro", LoadBalance::micro_batch},
                                                {"global", LoadBalance::global_batch},
                                                {"sequence", LoadBalance::sequence}});
       }},
      number(o.balance_alpha, "--balance-alpha", "weight of the load-balance loss"),
      {"--transport", "KIND", "how bytes move between ranks: peer or collective (default peer)",
       [&](const std::string& v) {
         o.transport = parse_choice<pleat::Transport>(
             "--transport", v, {{"peer", pleat::Transport::peer}, {"collective", pleat::Transport::collective}});
       }},
      number(o.prefetch, "--prefetch", "units gathered ahead"),
      number(o.seed, "--seed", "seed of the initial parameters"),
      toggle(o.check, "--check", "also run one rank in float64 on the same data and compare loss, gradients and norm"),
      toggle(o.runtime_mesh, "--runtime-mesh", "use RuntimeMesh even where the mesh is compiled in"),
      toggle(o.quiet, "--quiet", "print no mesh and no progress"),
      {"--json", "FILE", "log every step as one line of JSON", [&](const std::string& v) { o.json = v; }},
      number(o.fail_rank, "--fail-rank", "this rank throws, to see how a failure ends the run"),
      number(o.fail_step, "--fail-step", "in this step"),
  };
}

void require(bool holds, const std::string& text) {
  if (!holds) throw usage_error(text);
}
std::string divisors(long long n) {
  return pleat::message_of(pleat::Divisors{n}).c_str();
}
void require_positive(const char* flag, long long value) {
  require(value >= 1, std::string(flag) + " " + std::to_string(value) + " must be at least 1");
}

void derive_and_check(Options& o) {
  ModelShape& m = o.model;
  const auto text = [](auto n) { return std::to_string(n); };
  for (const auto& [flag, value] : std::initializer_list<std::pair<const char*, int>>{{"--steps", o.steps},
                                                                                      {"--seq", o.sequence},
                                                                                      {"--layers", m.layers},
                                                                                      {"--hidden", m.hidden},
                                                                                      {"--head-dim", m.head_dim},
                                                                                      {"--experts", m.experts},
                                                                                      {"--top-k", m.top_k}}) {
    require_positive(flag, value);
  }
  if (m.heads == 0) m.heads = m.hidden < 16 ? 1 : m.hidden / 16;
  if (m.kv_heads == 0) m.kv_heads = m.heads % 2 == 0 ? m.heads / 2 : m.heads;
  if (m.inner == 0) m.inner = m.hidden < 2 ? 1 : m.hidden / 2;
  require_positive("--heads", m.heads);
  require_positive("--kv-heads", m.kv_heads);
  require_positive("--inner", m.inner);
  require(m.heads % m.kv_heads == 0, "--kv-heads " + text(m.kv_heads) + " does not divide --heads " + text(m.heads) +
                                         "; valid: " + divisors(m.heads));
  require(m.head_dim % 2 == 0,
          "--head-dim " + text(m.head_dim) + " is odd; rotary positions need pairs: valid: 2 4 6 ..");
  require(m.top_k <= m.experts, "--top-k " + text(m.top_k) + " is more than --experts " + text(m.experts) +
                                    "; valid: 1 to " + text(m.experts));
  require(o.mesh.pp == 1, "--mesh: pp=" + text(o.mesh.pp) + "; the trainer runs meshes with pp1: valid pp: 1");
  pleat::experts_per_rank(o.mesh, m.experts);
  pleat::zigzag_chunk_tokens(o.mesh, o.sequence);

  const int dp = o.mesh.dp;
  if (o.batch == 0) o.batch = o.micro_batch > 0 ? o.micro_batch * dp : dp;
  require_positive("--batch", o.batch);
  require(o.batch % dp == 0, "--batch " + text(o.batch) + " is not divisible by dp=" + text(dp) +
                                 "; valid: " + text(dp) + " " + text(2 * dp) + " ..");
  if (o.micro_batch == 0) o.micro_batch = o.batch / dp;
  require_positive("--micro-batch", o.micro_batch);
  require(o.batch / dp % o.micro_batch == 0, "--micro-batch " + text(o.micro_batch) + " does not divide batch / dp = " +
                                                 text(o.batch / dp) + "; valid: " + divisors(o.batch / dp));
  require(o.warmup_steps >= 0 && o.prefetch >= 0 && o.clip >= 0, "--warmup, --prefetch and --clip must be at least 0");
  require(o.fail_rank < o.mesh.world_size,
          "--fail-rank " + text(o.fail_rank) + " is no rank; valid: 0 to " + text(o.mesh.world_size - 1));
}

}  // namespace

Options parse_options(int argc, const char* const* argv, bool& help) {
  Options options;
  options.text = PLEAT_DEFAULT_TEXT;
  const std::vector<Flag> flags = flags_of(options);
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--help" || name == "-h") {
      help = true;
      return options;
    }
    const auto flag = std::find_if(flags.begin(), flags.end(), [&](const Flag& f) { return f.name == name; });
    if (flag == flags.end()) throw usage_error("unknown option " + name + "; --help lists the valid ones");
    if (flag->takes.empty()) {
      flag->set("");
    } else if (++i == argc) {
      throw usage_error(name + " needs a value: " + flag->takes);
    } else {
      flag->set(argv[i]);
    }
  }
  derive_and_check(options);
  return options;
}

std::string help_text() {
  Options defaults;
  std::ostringstream out;
  out << "train_moe: trains a small Mixture-of-Experts transformer on the bytes of a text, over a folded mesh of "
         "ranks\n"
         "that are threads of this program.\n\n";
  for (const Flag& flag : flags_of(defaults)) {
    std::string left = "  " + flag.name + (flag.takes.empty() ? "" : " " + flag.takes);
    left.resize(std::max<std::size_t>(left.size() + 2, 24), ' ');
    out << left << flag.help << "\n";
  }
  return out.str();
}

}  // namespace train_moe
