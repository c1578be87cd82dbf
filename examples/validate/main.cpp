// validate: the folded mesh against the mesh before folding and against one rank, as a program with verdicts.
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <limits>
#include <map>
#include <random>

#include <pleat/mesh/text.hpp>

#include "arm.hpp"
#include "checkpoint_compare.hpp"
#include "data.hpp"
#include "numbers.hpp"
#include "verdict.hpp"

namespace validate {
namespace {

using train_moe::usage_error;

constexpr const char* usage =
    "validate correctness   loss curves on folded meshes: against the mesh before folding, two replicas, and one rank\n"
    "validate performance   times of steps with balanced routing, with a pair of equal arms beside\n"
    "validate checkpoint    saves on one mesh, loads on others, and compares all bits\n"
    "validate judge BASE0 BASE1 FEATURE   the same verdicts on logs that train_moe --json wrote elsewhere\n\n"
    "  --mesh MESH     one of the four meshes alone\n"
    "  --steps N       of each arm (default 32, of performance 8; checkpoint has its own)\n"
    "  --batch N       sequences of a step (default 16)\n"
    "  --repeats N     runs of each arm of performance (default 1)\n"
    "  --seed N        of the order of those runs (default: drawn)\n"
    "  --out DIR       for logs and checkpoints (default validation)\n"
    "  --text FILE     to train on (default: the project's LICENSE)\n"
    "  --help          this text\n";
constexpr const char* commands = "correctness performance checkpoint judge";

struct Settings {
  std::string mesh, batch = "16", out = "validation", text;
  int steps = 0;  // 0: the command's own number
  int repeats = 1;
  unsigned seed = std::random_device()();
};

/// The meshes of 32 ranks that the change to folding was validated on, with the models that ran on them.
struct Case {
  const char* model;
  const char* mesh;
};
constexpr Case cases[] = {{"qwen3-30b-a3b", "pp4-dp8-cp1-ep1"},
                          {"qwen3-30b-a3b", "pp1-dp8-cp4-ep8"},
                          {"deepseek-v2-lite", "pp2-dp8-cp2-ep8"},
                          {"deepseek-v2-lite", "pp2-dp4-cp4-ep2"}};

/// The preset, scaled to host ranks: all widths by 64, and heads to four.
std::vector<std::string> model_flags(const std::string& model) {
  std::vector<std::string> flags = {"--preset", model, "--seq",   "64", "--layers",     "8",
                                    "--hidden", "32",  "--heads", "4",  "--vocabulary", "256"};
  const std::vector<std::string> own =
      model == "qwen3-30b-a3b"
          ? std::vector<std::string>{"--kv-heads", "2",         "--head-dim", "8",       "--inner",
                                     "12",         "--experts", "32",         "--top-k", "4"}
          : std::vector<std::string>{"--kv-heads",    "4",   "--lora",      "8",  "--nope-dim", "8",
                                     "--rope-dim",    "4",   "--value-dim", "8",  "--inner",    "22",
                                     "--dense-inner", "171", "--experts",   "16", "--top-k",    "6"};
  flags.insert(flags.end(), own.begin(), own.end());
  return flags;
}

train_moe::Options options_of(const Settings& settings, const Case& c, const std::string& mesh,
                              const std::string& steps, std::vector<std::string> more = {}) {
  std::vector<std::string> flags = model_flags(c.model);
  flags.insert(flags.end(), {"--mesh", mesh, "--steps", steps, "--batch", settings.batch, "--micro-batch", "1",
                             "--warmup-from", "1e-6", "--lr", "1e-5", "--warmup", steps});
  if (!settings.text.empty()) flags.insert(flags.end(), {"--text", settings.text});
  flags.insert(flags.end(), more.begin(), more.end());
  std::vector<const char*> arguments = {"validate"};
  for (const std::string& flag : flags) arguments.push_back(flag.c_str());
  bool help = false;
  return train_moe::parse_options(static_cast<int>(arguments.size()), arguments.data(), help);
}

std::vector<Case> chosen(const Settings& settings) {
  std::vector<Case> some;
  for (const Case& c : cases) {
    if (settings.mesh.empty() || settings.mesh == c.mesh) some.push_back(c);
  }
  if (some.empty()) {
    std::string valid;
    for (const Case& c : cases) valid += std::string(" ") + c.mesh;
    throw usage_error("--mesh " + settings.mesh + " is none of the meshes; valid:" + valid);
  }
  return some;
}

/// Refuses what the runs of these cases would refuse, and makes the folder for their logs.
void check(const Settings& settings, const std::vector<Case>& some, const std::string& steps) {
  for (const Case& c : some) {
    const train_moe::Options o = options_of(settings, c, c.mesh, steps);
    const train_moe::Text text(o.text, o.sequence, o.batch);
  }
  std::error_code failure;
  std::filesystem::create_directories(settings.out, failure);
  if (failure || !std::filesystem::is_directory(settings.out, failure)) {
    throw usage_error("--out " + settings.out + " cannot be made; name a folder where files can be written");
  }
}

/// Prints the rows of one comparison; whether none failed. A run that routes otherwise in more than a quarter of the
/// steps fails as well.
bool show_comparison(const std::string& label, const Log& base0, const Log& base1, const Log& feature) {
  require_one_commit({base0, base1, feature});
  const auto noise = steps_alike(base0, base1), alike = steps_alike(base0, feature);
  const std::size_t steps = base0.entries.size();
  const std::pair<const char*, double Entry::*> metrics[] = {
      {"cross-entropy-loss", &Entry::loss}, {"load-balance-loss", &Entry::balance}, {"gradient-norm", &Entry::norm}};
  bool passes = 4 * alike.size() >= 3 * steps;
  for (const auto& [metric, member] : metrics) {
    const Comparison c{mean_difference(base0.column(member, noise), base1.column(member, noise)),
                       mean_difference(base0.column(member, alike), feature.column(member, alike))};
    std::printf("| %s | %s | %.1e | %.1e | %.2f | %s | %zu, %zu |\n", label.c_str(), metric, c.envelope, c.signal,
                c.ratio(), name_of(c.verdict()), steps - noise.size(), steps - alike.size());
    passes = passes && c.verdict() != Verdict::fail;
  }
  const auto first = [&](const Log& other) { return std::abs(base0.entries[0].loss - other.entries[0].loss); };
  std::printf("| %s | step-1 forward | %.1e | %.1e | | | |\n", label.c_str(), first(base1), first(feature));
  std::fflush(stdout);
  return passes;
}
void show_comparison_header() {
  std::printf(
      "| model and mesh | metric | envelope | signal | ratio | verdict | steps routed otherwise |\n"
      "|---|---|---|---|---|---|---|\n");
}

/// Curves in float32, whose differences stand well above the last bit of a mean; one rank is compared in float64.
bool correctness(const Settings& settings) {
  const std::string steps = std::to_string(settings.steps == 0 ? 32 : settings.steps);
  const std::vector<Case> some = chosen(settings);
  check(settings, some, steps);
  bool passes = true;
  std::vector<std::pair<std::string, Outcome>> exact;
  show_comparison_header();
  for (const Case& c : some) {
    const std::string mesh = c.mesh;
    const auto run = [&](const std::string& arm, const std::string& on, bool unfolded, std::vector<std::string> more) {
      more.push_back("--log-routing");
      return run_arm({mesh + "-" + arm, options_of(settings, c, on, steps, std::move(more)), unfolded}, settings.out);
    };
    const Log base0 = run("base0", mesh, true, {"--dtype", "f32"}).log;
    const Log base1 = run("base1", mesh, true, {"--dtype", "f32", "--perturb"}).log;
    const Log folded0 = run("folded0", mesh, false, {"--dtype", "f32"}).log;
    const Log folded1 = run("folded1", mesh, false, {"--dtype", "f32", "--perturb"}).log;
    const Log replicas = run("replicas2", mesh + "-r2", false, {"--dtype", "f32"}).log;
    const std::string label = std::string(c.model) + " " + mesh;
    passes = show_comparison(label, base0, base1, folded0) && passes;
    passes = show_comparison(label + ", r2 against r1", folded0, folded1, replicas) && passes;
    exact.emplace_back(label, run("exact", mesh, false, {"--check"}));
  }
  std::printf(
      "\ncommit %s, %s steps. Folded in float64 against one rank in float64, largest relative difference of any "
      "step:\n\n",
      exact[0].second.log.commit.c_str(), steps.c_str());
  std::printf("| model and mesh | losses | any gradient | gradient norm |\n|---|---|---|---|\n");
  for (const auto& [label, outcome] : exact) {
    std::printf("| %s | %.1e | %.1e | %.1e |\n", label.c_str(), outcome.loss, outcome.gradients, outcome.norm);
    passes = passes && std::max({outcome.loss, outcome.gradients, outcome.norm}) <= 1e-9;
  }
  return passes;
}

bool performance(const Settings& settings) {
  const std::string steps = std::to_string(settings.steps == 0 ? 8 : settings.steps);
  const std::vector<Case> some = chosen(settings);
  check(settings, some, steps);
  std::mt19937 random(settings.seed);
  std::string commit;
  std::printf(
      "| model and mesh | base s | folded s | delta | aa0 s | aa1 s | A/A | r2 s | r2 delta | peak MiB base, folded, "
      "r2 |\n|---|---|---|---|---|---|---|---|---|---|\n");
  for (const Case& c : some) {
    struct Kind {
      const char* name;
      bool unfolded;
      const char* replicas;
    };
    const Kind kinds[] = {
        {"base", true, ""}, {"folded", false, ""}, {"aa0", true, ""}, {"aa1", true, ""}, {"r2", false, "-r2"}};
    std::vector<std::pair<int, int>> order;  // (arm, repeat)
    for (int repeat = 0; repeat < settings.repeats; ++repeat) {
      for (int arm = 0; arm < static_cast<int>(std::size(kinds)); ++arm) order.emplace_back(arm, repeat);
    }
    std::shuffle(order.begin(), order.end(), random);
    std::map<std::string, std::vector<double>> seconds;
    std::map<std::string, double> peak;
    for (const auto& [arm, repeat] : order) {
      const Kind& kind = kinds[arm];
      const std::string mesh = c.mesh;
      const Log log =
          run_arm({mesh + "-" + kind.name + "-" + std::to_string(repeat),
                   options_of(settings, c, mesh + kind.replicas, steps, {"--force-balance"}), kind.unfolded},
                  settings.out)
              .log;
      seconds[kind.name].push_back(median_after_first(log.column(&Entry::seconds)));
      peak[kind.name] = log.entries.back().peak_bytes / 0x1p20;
      commit = log.commit;
    }
    const auto time = [&](const char* name) {
      const std::vector<double>& all = seconds.at(name);
      return *std::min_element(all.begin(), all.end());
    };
    std::printf("| %s %s | %.3f | %.3f | %+.1f%% | %.3f | %.3f | %+.1f%% | %.3f | %+.1f%% | %.2f, %.2f, %.2f |\n",
                c.model, c.mesh, time("base"), time("folded"), percent_more(time("base"), time("folded")), time("aa0"),
                time("aa1"), percent_more(time("aa0"), time("aa1")), time("r2"),
                percent_more(time("folded"), time("r2")), peak["base"], peak["folded"], peak["r2"]);
    std::fflush(stdout);
  }
  std::printf("\ncommit %s, medians of steps 2 to %s, arms in an order drawn with seed %u\n", commit.c_str(),
              steps.c_str(), settings.seed);
  return true;
}

/// A run's state saved on one mesh, and what other meshes make of it when they load and save it again.
bool checkpoint(const Settings& settings) {
  const Case& from = cases[3];
  check(settings, {from}, "4");
  const std::string saved = settings.out + "/saved";
  const auto run = [&](const std::string& name, const std::string& mesh, const char* steps,
                       std::vector<std::string> more) {
    more.insert(more.end(), {"--optimizer", "muon", "--warmup", "0"});
    const train_moe::Options o = options_of(settings, from, mesh, steps, std::move(more));
    return run_arm({name, o, false}, settings.out, o.load.empty() ? 1 : 3);
  };
  bool passes = true;
  const Log whole = run("whole", from.mesh, "4", {}).log;
  run("first half", from.mesh, "2", {"--save", saved});
  const Log rest = run("second half", from.mesh, "4", {"--load", saved}).log;
  bool equal = true;
  for (std::size_t i = 0; i < rest.entries.size(); ++i) {
    equal =
        equal && rest.entries[i].loss == whole.entries[i + 2].loss && rest.entries[i].norm == whole.entries[i + 2].norm;
  }
  std::printf("%s: saved after 2 steps, resumed on the same mesh: steps 3 and 4 have %s of a run that never stopped\n",
              from.mesh, equal ? "the bits" : "OTHER BITS than those");
  passes = passes && equal;
  for (const char* mesh : {"pp1-dp8-cp4-ep8", "pp1-dp1-cp1-ep1"}) {
    const std::string again = settings.out + "/again-" + mesh;
    run(std::string("again ") + mesh, mesh, "2", {"--load", saved, "--save", again});
    const CheckpointDifference found = compare_checkpoints(saved, again);
    std::printf("%s: loaded and saved again: %zu tensors, %.1f MiB, ", mesh, found.tensors,
                static_cast<double>(found.bytes) / 0x1p20);
    std::printf(found.first.empty() ? "all bits equal\n" : "DIFFERENT in %s\n", found.first.c_str());
    passes = passes && found.first.empty();
  }
  return passes;
}

bool judge(const std::vector<std::string>& files, const Settings& settings) {
  if (files.size() != 3) throw usage_error("judge needs three logs: BASE0 BASE1 FEATURE");
  const int steps = settings.steps == 0 ? 32 : settings.steps;
  std::vector<Log> logs;
  for (const std::string& file : files) logs.push_back(read_log(file, 1, steps));
  require_one_commit(logs);
  show_comparison_header();
  return show_comparison(files[2], logs[0], logs[1], logs[2]);
}

/// Sets the option `name` of `command`. Errors: usage_error for a value that is none, and for an option it does not
/// have.
void set(Settings& settings, const std::string& command, const std::string& name, const std::string& value) {
  const bool trains = command != "judge", measures = command == "performance";
  if (const bool of_cases = measures || command == "correctness"; of_cases && name == "--mesh") {
    settings.mesh = value;
  } else if (command != "checkpoint" && name == "--steps") {  // medians leave out the first
    settings.steps = train_moe::parse_number<int>(name, value, {measures ? 2 : 1, std::numeric_limits<int>::max()});
  } else if (trains && name == "--batch") {
    settings.batch = value;
  } else if (trains && name == "--out") {
    settings.out = value;
  } else if (trains && name == "--text") {
    settings.text = value;
  } else if (measures && name == "--repeats") {
    settings.repeats = train_moe::parse_number<int>(name, value, {1, 1000});
  } else if (measures && name == "--seed") {
    settings.seed = train_moe::parse_number<unsigned>(name, value, {0, std::numeric_limits<unsigned>::max()});
  } else {
    throw usage_error(name + " is no option of " + command + "; --help lists the valid ones");
  }
}

int run(const std::vector<std::string>& words) {
  if (std::find(words.begin(), words.end(), "--help") != words.end()) {
    std::cout << usage;
    return 0;
  }
  if (words.empty()) throw usage_error(std::string("name a command; valid: ") + commands);
  const std::string& command = words[0];
  const bool is_known =
      command == "correctness" || command == "performance" || command == "checkpoint" || command == "judge";
  if (!is_known) throw usage_error("unknown command " + command + "; valid: " + commands);
  Settings settings;
  std::vector<std::string> rest;
  for (std::size_t i = 1; i < words.size(); ++i) {
    if (words[i].rfind("--", 0) != 0) {
      rest.push_back(words[i]);
      continue;
    }
    if (i + 1 == words.size()) throw usage_error(words[i] + " needs a value");
    set(settings, command, words[i], words[i + 1]);
    ++i;
  }
  if (command == "judge") return judge(rest, settings) ? 0 : 1;
  if (!rest.empty()) throw usage_error(rest[0] + " is no option of " + command);
  const auto runs = command == "correctness" ? correctness : command == "performance" ? performance : checkpoint;
  return runs(settings) ? 0 : 1;
}

}  // namespace
}  // namespace validate

int main(int argc, char** argv) {
  try {
    return validate::run({argv + 1, argv + argc});
  } catch (const train_moe::usage_error& e) {
    std::cerr << "validate: " << e.what() << "\n";
    return 2;
  } catch (const std::exception& e) {
    std::cerr << "validate: " << e.what() << "\n";
    return 1;
  }
}
