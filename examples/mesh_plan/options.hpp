// What mesh_plan is asked: one table of settings, which the command line and the columns of a measured file share.
#pragma once

#include <charconv>
#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <pleat/estimate.hpp>

namespace mesh_plan {

/// Bad input: the program prints it and exits with 2.
struct usage_error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Request {
  pleat::estimate::Job job;
  std::string mesh;  ///< one in detail
  pleat::estimate::Wanted wanted;
  int top = 20;
  std::string json, svg, check;
  double within = 0, time_within = 0;  ///< percent, of --check; 0: any
  bool help = false;
};

template <class Number>
Number number(std::string_view name, std::string_view text) {
  Number value{};
  const auto [stop, failure] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (failure == std::errc::result_out_of_range) {
    pleat::fail<pleat::shape_error>("pleat[N05]: ", name, " ", text, " is no number that fits");
  }
  if (failure != std::errc{} || stop != text.data() + text.size()) {
    pleat::fail<pleat::shape_error>("pleat[N05]: ", name, " needs a number, not \"", text, "\"");
  }
  return value;
}

inline pleat::DType dtype(std::string_view name, std::string_view text) {
  if (text == "bf16") return pleat::DType::bf16;
  if (text == "f32") return pleat::DType::f32;
  if (text == "f64") return pleat::DType::f64;
  pleat::fail<pleat::shape_error>("pleat[N05]: ", name, " \"", text, "\"; valid: bf16 f32 f64");
}

inline bool flag(std::string_view name, std::string_view text) {
  if (text != "0" && text != "1") pleat::fail<pleat::shape_error>("pleat[N05]: ", name, " \"", text, "\"; valid: 0 1");
  return text == "1";
}

struct Setting {
  const char* name;
  const char* takes;
  const char* help;
  std::function<void(Request&, std::string_view)> set;
};

/// The settings in the order of the help; a heading has no `set`.
inline std::vector<Setting> settings() {
  using namespace pleat::estimate;
  const auto integer = [](const char* name, const char* help, auto field) {
    return Setting{name, "N", help, [name, field](Request& r, std::string_view text) {
                     auto& value = field(r);
                     value = number<std::remove_reference_t<decltype(value)>>(name, text);
                   }};
  };
  const auto size = [&](const char* name, const char* help, int Model::*field) {
    return integer(name, help, [field](Request& r) -> int& { return r.job.model.*field; });
  };
  const auto degree = [&](const char* name, const char* help, int Wanted::*field) {
    return Setting{name, "N", help, [name, field](Request& r, std::string_view text) {
                     r.wanted.*field = number<int>(name, text);
                     if (r.wanted.*field < 1) {
                       pleat::fail<pleat::shape_error>("pleat[N05]: ", name, " ", text, "; degrees are 1 or more");
                     }
                   }};
  };
  const auto rate = [](const char* name, const char* help, double unit, double Machine::*field) {
    return Setting{name, "X", help, [name, unit, field](Request& r, std::string_view text) {
                     r.job.machine.*field = number<double>(name, text) * unit;
                     if (!(r.job.machine.*field > 0)) {
                       pleat::fail<pleat::shape_error>("pleat[N05]: ", name, " ", text, "; rates are above 0");
                     }
                   }};
  };
  const auto bytes = [](const char* name, const char* help, double unit, auto field) {
    return Setting{name, "X", help, [name, unit, field](Request& r, std::string_view text) {
                     const auto value = number<double>(name, text);
                     if (!(value >= 0 && value <= 1 << 30)) {
                       pleat::fail<pleat::shape_error>("pleat[N05]: ", name, " ", text, "; valid: 0 to 2^30");
                     }
                     field(r) = static_cast<std::size_t>(value * unit);
                   }};
  };
  const auto percent = [](const char* name, const char* help, double Request::*field) {
    return Setting{name, "P", help, [name, field](Request& r, std::string_view text) {
                     r.*field = number<double>(name, text);
                     if (!(r.*field >= 0 && r.*field <= 1e9)) {
                       pleat::fail<pleat::shape_error>("pleat[N05]: ", name, " ", text,
                                                       "; valid: 0 (any) to 1e9 percent");
                     }
                   }};
  };
  const auto file = [](const char* name, const char* help, std::string Request::*field) {
    return Setting{name, "FILE", help, [field](Request& r, std::string_view text) { r.*field = text; }};
  };
  return {
      {"model", "NAME", "qwen3-30b-a3b or deepseek-v2-lite at full size; sizes that follow replace its own",
       [](Request& r, std::string_view text) { r.job.model = preset(text); }},
      size("layers", "layers", &Model::layers),
      size("hidden", "width", &Model::hidden),
      size("vocabulary", "tokens of the vocabulary", &Model::vocabulary),
      size("heads", "query heads", &Model::heads),
      size("kv-heads", "key heads", &Model::kv_heads),
      size("qk-dim", "of a head", &Model::qk_dim),
      size("v-dim", "of a head's values", &Model::v_dim),
      size("latent", "MLA: numbers that keys and values are made of; 0: none", &Model::latent),
      size("rope-dim", "MLA: of the rope key that heads share", &Model::rope_dim),
      {"qk-norm", "0|1", "RMSNorm of each head's queries and keys",
       [](Request& r, std::string_view text) { r.job.model.qk_norm = flag("qk-norm", text); }},
      {"by-sequence", "0|1", "whether the load-balance loss counts each sequence alone",
       [](Request& r, std::string_view text) { r.job.model.balances_sequences = flag("by-sequence", text); }},
      size("experts", "routed experts of a layer", &Model::experts),
      size("top-k", "experts of a token", &Model::top_k),
      size("inner", "width of an expert", &Model::inner),
      size("shared-experts", "experts of all tokens", &Model::shared_experts),
      size("dense-layers", "first layers that have one MLP", &Model::dense_layers),
      size("dense-inner", "width of that MLP", &Model::dense_inner),
      integer("world", "GPUs", [](Request& r) -> int& { return r.job.world; }),
      {"gpu-gib", "X", "memory of a GPU (80)",
       [](Request& r, std::string_view text) {
         const double given = number<double>("gpu-gib", text) * (1 << 30);
         if (!(given >= 1 && given <= 0x1p60)) {
           pleat::fail<pleat::shape_error>("pleat[N05]: gpu-gib ", text, "; valid: above 0, up to 2^30");
         }
         r.job.gpu_bytes = static_cast<std::size_t>(given);
       }},
      integer("domain", "GPUs that NVLink joins (8)", [](Request& r) -> int& { return r.job.domain; }),
      integer("sequence", "tokens (4096)", [](Request& r) -> std::int64_t& { return r.job.sequence; }),
      integer("batch", "sequences of a step (1024)", [](Request& r) -> std::int64_t& { return r.job.batch; }),
      integer("micro-batch", "sequences at a time (1)", [](Request& r) -> int& { return r.job.micro_batch; }),
      {"schedule", "NAME", "1f1b, 1f1b-pairs, zb-v or dualpipev (dualpipev)",
       [](Request& r, std::string_view text) { r.job.schedule = pleat::pipeline::parse_kind(text); }},
      {"optimizer", "NAME", "adamw or muon (adamw)",
       [](Request& r, std::string_view text) {
         if (text != "adamw" && text != "muon") {
           pleat::fail<pleat::shape_error>("pleat[N05]: optimizer \"", text, "\"; valid: adamw muon");
         }
         r.job.optimizer = text == "muon" ? pleat::fsdp::Optimizer::muon : pleat::fsdp::Optimizer::adamw;
       }},
      {"dtype", "DTYPE", "of parameters and activations: bf16, f32 or f64 (bf16)",
       [](Request& r, std::string_view text) {
         r.job.compute = dtype("dtype", text);
         r.job.gradient = accumulator(r.job.compute);
       }},
      {"gradients", "DTYPE", "what gradients travel in (the accumulator of the dtype)",
       [](Request& r, std::string_view text) { r.job.gradient = dtype("gradients", text); }},
      integer("prefetch", "units gathered ahead (1)", [](Request& r) -> int& { return r.job.prefetch; }),
      {"capacity", "X", "rows of experts over those of balanced routing; 0: room for every routing (1.25)",
       [](Request& r, std::string_view text) { r.job.capacity = number<double>("capacity", text); }},
      integer("row-alignment", "rows of an expert start at multiples of this (16)",
              [](Request& r) -> std::int64_t& { return r.job.row_alignment; }),
      rate("network", "GB/s of a GPU's adapter (50)", 1e9, &Machine::network),
      rate("nvlink", "GB/s of a GPU, each way", 1e9, &Machine::nvlink),
      bytes("kernels-mib", "workspace of a lane's kernels", 1 << 20,
            [](Request& r) -> std::size_t& { return r.job.machine.kernels_bytes; }),
      bytes("context-mib", "memory of a CUDA context", 1 << 20,
            [](Request& r) -> std::size_t& { return r.job.machine.context_bytes; }),
      bytes("communicator-mib", "memory of a communicator", 1 << 20,
            [](Request& r) -> std::size_t& { return r.job.machine.communicator_bytes; }),
      {"mesh", "MESH", "this one in detail, as in pp2-dp4-cp4-ep2",
       [](Request& r, std::string_view text) { r.mesh = text; }},
      degree("pp", "only meshes of this degree", &Wanted::pp),
      degree("dp", "", &Wanted::dp),
      degree("cp", "", &Wanted::cp),
      degree("ep", "", &Wanted::ep),
      degree("replicas", "", &Wanted::replicas),
      {"top", "N", "meshes shown (20)",
       [](Request& r, std::string_view text) {
         r.top = number<int>("top", text);
         if (r.top < 1) pleat::fail<pleat::shape_error>("pleat[N05]: top ", text, "; valid: 1 or more meshes");
       }},
      file("json", "also write all meshes", &Request::json),
      file("svg", "also draw the first meshes", &Request::svg),
      file("check",
           "compare with measured runs: CSV whose columns are settings, peak-gib and step-ms, or JSON with the same",
           &Request::check),
      percent("within", "with check: fail when an estimate of memory is off by more, in percent", &Request::within),
      percent("time-within", "the same of the expected time", &Request::time_within),
  };
}

/// Errors: usage_error for a setting that is not known; N05 and those of the value.
inline void set(Request& request, std::string_view name, std::string_view value) {
  for (const Setting& setting : settings()) {
    if (setting.name == name) return setting.set(request, value);
  }
  throw usage_error("there is no setting \"" + std::string(name) + "\"; --help lists them");
}

inline Request read(const std::vector<std::string_view>& arguments) {
  Request request;
  request.job.model = pleat::estimate::preset("qwen3-30b-a3b");
  request.job.world = 32;
  std::string_view limit;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string_view name = arguments[i];
    if (name == "--help") {
      request.help = true;
      return request;
    }
    if (name.substr(0, 2) != "--") throw usage_error("\"" + std::string(name) + "\" is not understood");
    if (i + 1 == arguments.size()) throw usage_error(std::string(name) + " needs a value");
    set(request, name.substr(2), arguments[++i]);
    if (name == "--within" || name == "--time-within") limit = name;
  }
  if (!limit.empty() && request.check.empty()) {
    throw usage_error(std::string(limit) + " is of estimates beside measured runs; name their file with --check");
  }
  return request;
}

inline std::string help_text() {
  std::string text = "mesh_plan [options]: which meshes can run a job, what they take and how long a step takes\n\n";
  for (const Setting& setting : settings()) {
    std::string left = "  --" + std::string(setting.name) + ' ' + setting.takes;
    left.resize(std::max<std::size_t>(left.size() + 1, 24), ' ');
    text += left + setting.help + '\n';
  }
  return text;
}

}  // namespace mesh_plan
