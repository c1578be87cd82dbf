// Parsing the command line.
#include "options.hpp"

#include "numbers.hpp"
#include "option_rules.hpp"

#include <algorithm>
#include <functional>
#include <sstream>
#include <vector>

#include <pleat/mesh/text.hpp>

namespace train_moe {
namespace {

constexpr Range<int> up_to(int most) {
  return {1, most};
}
constexpr Range<double> not_negative{0, std::numeric_limits<double>::max()};

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
  // A number whose default the help has in words, because it is derived from others.
  const auto derived = [](auto& target, const std::string& name, const std::string& help, const auto& valid) {
    return Flag{name, "N", help,
                [&target, name, valid](const std::string& v) { target = parse_number(name, v, valid); }};
  };
  const auto number = [&](auto& target, const std::string& name, const std::string& help, const auto& valid) {
    std::ostringstream text;
    text << help << " (default " << target << ")";
    return derived(target, name, text.str(), valid);
  };
  const auto toggle = [](bool& target, const std::string& name, const std::string& help) {
    return Flag{name, "", help, [&target](const std::string&) { target = true; }};
  };
  ModelShape& m = o.model;
  return {
      {"--mesh", "MESH", "ranks, as pp1-dp8-cp4-ep8 or with replicas pp1-dp4-cp4-ep4-r2 (default pp1-dp1-cp1-ep1)",
       [&](const std::string& v) { o.mesh = pleat::parse_mesh(v); }},
      {"--preset", "NAME", "the sizes of qwen3-30b-a3b or deepseek-v2-lite, which other flags change",
       [](const std::string&) {}},
      {"--text", "FILE", "the text to train on, read as bytes (default: the project's LICENSE)",
       [&](const std::string& v) { o.text = v; }},
      number(o.steps, "--steps", "optimizer steps", up_to(most_int)),
      number(o.sequence, "--seq", "tokens of a sequence", up_to(most_sequence)),
      derived(o.batch, "--batch", "sequences of a step, over all data ranks (default dp)", up_to(most_sequences)),
      derived(o.micro_batch, "--micro-batch", "sequences of a micro-batch on one data rank (default batch / dp)",
              up_to(most_sequences)),
      number(m.layers, "--layers", "transformer layers", up_to(most_layers)),
      number(m.hidden, "--hidden", "model width", up_to(most_width)),
      derived(m.heads, "--heads", "query heads (default hidden / 16)", up_to(most_heads)),
      derived(m.kv_heads, "--kv-heads", "key and value heads (default heads / 2)", up_to(most_heads)),
      number(m.head_dim, "--head-dim", "width of a head", Range<int>{2, most_head_dim}),
      number(m.experts, "--experts", "routed experts of a layer", up_to(most_experts)),
      number(m.top_k, "--top-k", "experts of a token", up_to(most_experts)),
      derived(m.inner, "--inner", "inner width of an expert (default hidden / 2)", up_to(most_width)),
      number(m.shared, "--shared", "experts that every token takes", Range<int>{0, most_experts}),
      number(m.dense_layers, "--dense-layers", "layers without experts, at the beginning", Range<int>{0, most_layers}),
      derived(m.dense_inner, "--dense-inner", "inner width of those (default 2 * hidden)", up_to(most_width)),
      number(m.lora, "--lora", "width of the latent of keys and values (MLA); 0: grouped-query attention",
             Range<int>{0, most_width}),
      number(m.nope_dim, "--nope-dim", "width of a head's key that is made of the latent", up_to(most_head_dim)),
      number(m.rope_dim, "--rope-dim", "width of its rotated part", Range<int>{2, most_head_dim}),
      number(m.value_dim, "--value-dim", "width of a head's value that is made of the latent", up_to(most_head_dim)),
      number(m.vocabulary, "--vocabulary", "rows of the embedding; the text uses 256",
             Range<int>{least_vocabulary, most_vocabulary}),
      toggle(o.packed, "--packed", "sequences hold several documents, that do not see each other"),
      toggle(o.ragged, "--ragged", "micro-batches have several lengths: all, 3/4 and 1/2 of --seq"),
      {"--schedule", "KIND", "of the pipeline: 1f1b, 1f1b-pairs, zb-v, dualpipev (default 1f1b for pp1, else zb-v)",
       [&](const std::string& v) {
         try {
           o.schedule = pleat::pipeline::parse_kind(v);
         } catch (const pleat::shape_error& e) {
           throw usage_error(std::string("--schedule: ") + e.what());
         }
       }},
      {"--dtype", "f64|f32|bf16", "activations, and what is gathered (default f64)",
       [&](const std::string& v) {
         o.dtype = parse_choice<pleat::DType>(
             "--dtype", v, {{"f64", pleat::DType::f64}, {"f32", pleat::DType::f32}, {"bf16", pleat::DType::bf16}});
       }},
      {"--optimizer", "KIND", "of matrices in the middle of the model: adamw or muon (default adamw)",
       [&](const std::string& v) {
         using pleat::fsdp::Optimizer;
         o.optimizer =
             parse_choice<Optimizer>("--optimizer", v, {{"adamw", Optimizer::adamw}, {"muon", Optimizer::muon}});
       }},
      number(o.muon_rate, "--muon-lr", "learning rate of Muon after warm-up", not_negative),
      number(o.learning_rate, "--lr", "learning rate after warm-up", not_negative),
      number(o.warmup_from, "--warmup-from", "learning rate of the first step", not_negative),
      number(o.warmup_steps, "--warmup", "steps of linear warm-up", Range<int>{0, most_int}),
      number(o.clip, "--clip", "largest gradient norm, 0 for none", not_negative),
      number(o.weight_decay, "--weight-decay", "decay of matrices", not_negative),
      {"--balance", "KIND", "load-balance loss: none, micro, global (batch), sequence (default global)",
       [&](const std::string& v) {
         using pleat::moe::BalanceScope;
         o.balance = parse_choice<std::optional<BalanceScope>>("--balance", v,
                                                               {{"none", std::nullopt},
                                                                {"micro", BalanceScope::micro_batch},
                                                                {"global", BalanceScope::global_batch},
                                                                {"sequence", BalanceScope::sequence}});
       }},
      number(o.balance_alpha, "--balance-alpha", "weight of the load-balance loss", not_negative),
      {"--transport", "KIND", "how bytes move between ranks: peer or collective (default peer)",
       [&](const std::string& v) {
         o.transport = parse_choice<pleat::Transport>(
             "--transport", v, {{"peer", pleat::Transport::peer}, {"collective", pleat::Transport::collective}});
       }},
      toggle(o.loopback, "--loopback",
             "rows of experts come back instead of going to other ranks: what a step takes but for their transfers; "
             "what is learned means nothing"),
      toggle(o.force_balance, "--force-balance", "tokens take experts in turn, whatever the router says"),
      number(o.capacity, "--capacity",
             "rows that experts have room for, in multiples of balanced routing; 0: any routing", not_negative),
      number(o.prefetch, "--prefetch", "units gathered ahead", Range<int>{0, most_prefetch}),
      number(o.seed, "--seed", "seed of the initial parameters",
             Range<std::uint64_t>{0, std::numeric_limits<std::uint64_t>::max()}),
      toggle(o.perturb, "--perturb", "start from parameters moved by one unit in the last place"),
      {"--save", "DIR", "save checkpoints in this folder", [&](const std::string& v) { o.save = v; }},
      {"--load", "DIR", "go on from the newest checkpoint in this folder, of any mesh",
       [&](const std::string& v) { o.load = v; }},
      derived(o.every, "--every", "steps between saves (default: after the last alone)", up_to(most_int)),
      toggle(o.check, "--check", "also run one rank in float64 on the same data and compare loss, gradients and norm"),
      toggle(o.runtime_mesh, "--runtime-mesh", "use RuntimeMesh even where the mesh is compiled in"),
      toggle(o.quiet, "--quiet", "print no mesh and no progress"),
      {"--json", "FILE", "log every step as one line of JSON", [&](const std::string& v) { o.json = v; }},
      {"--times", "FILE", "write when each operation of the last step ran, for pipeline_map --times",
       [&](const std::string& v) { o.times = v; }},
      number(o.peak_tflops, "--peak-tflops", "what a rank's device computes at most, to show which share of it is used",
             not_negative),
      toggle(o.log_routing, "--log-routing", "log a digest of the experts that tokens took; waits for the device"),
      number(o.fail_rank, "--fail-rank", "this rank throws, to see how a failure ends the run",
             Range<int>{-1, most_ranks - 1}),
      number(o.fail_step, "--fail-step", "in this step", up_to(most_int)),
  };
}

/// The sizes of the models that are named; flags change them.
void apply_preset(const std::string& name, Options& o) {
  using pleat::moe::BalanceScope;
  const ModelShape qwen{.layers = 48,
                        .hidden = 2048,
                        .heads = 32,
                        .kv_heads = 4,
                        .head_dim = 128,
                        .experts = 128,
                        .top_k = 8,
                        .inner = 768,
                        .vocabulary = 151936};
  const ModelShape deepseek{.layers = 27,
                            .hidden = 2048,
                            .heads = 16,
                            .kv_heads = 16,
                            .lora = 512,
                            .nope_dim = 128,
                            .rope_dim = 64,
                            .value_dim = 128,
                            .experts = 64,
                            .top_k = 6,
                            .inner = 1408,
                            .shared = 2,
                            .dense_layers = 1,
                            .dense_inner = 10944,
                            .vocabulary = 102400,
                            .renormalize = false,
                            .rope_theta = 1e4};
  const bool is_qwen = parse_choice<bool>("--preset", name, {{"qwen3-30b-a3b", true}, {"deepseek-v2-lite", false}});
  o.model = is_qwen ? qwen : deepseek;
  o.balance = is_qwen ? BalanceScope::global_batch : BalanceScope::sequence;
  o.balance_alpha = is_qwen ? 1e-3 : 3e-3;
}

}  // namespace

Options parse_options(int argc, const char* const* argv, bool& help) {
  Options options;
  options.text = PLEAT_DEFAULT_TEXT;
  const std::vector<Flag> flags = flags_of(options);
  for (int i = 1; i + 1 < argc; ++i) {  // first, so that flags change it wherever they stand
    if (std::string(argv[i]) == "--preset") apply_preset(argv[i + 1], options);
  }
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
