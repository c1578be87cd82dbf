// A step of the trainer on GPUs: loss and every gradient against one host rank in float64 that takes the same experts,
// against what one GPU rank achieves, and the same bits twice.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>

#include <unistd.h>

#include <train_moe/check.hpp>
#include <train_moe/cuda/leaves.cuh>
#include <train_moe/host/backend.hpp>

#include <pleat/mesh/text.hpp>
#include <support/repeats.hpp>

namespace train_moe_testing {

using train_moe::Book;
using train_moe::Options;
using train_moe::RoutingFollower;
using train_moe::RoutingRecord;
using train_moe::StepReport;

/// A text of random bytes, that is gone after the run. Programs may run side by side.
class TextFile {
 public:
  TextFile() : name_("train_moe_test_text." + std::to_string(getpid())) {
    std::ofstream out(name_, std::ios::binary);
    unsigned state = 7;
    for (int i = 0; i < 1 << 16; ++i) out.put(static_cast<char>((state = state * 1664525u + 1013904223u) >> 24));
  }
  ~TextFile() { std::remove(name_.c_str()); }
  const char* name() const { return name_.c_str(); }

 private:
  std::string name_;
};

/// What a step leaves.
struct Outcome {
  StepReport report;
  Book gradients, parameters;  // the parameters after the update
};

/// Each loads code when it is first used, which a step must not.
template <class TrainerType>
std::size_t chosen_algorithms(const TrainerType& trainer) {
  std::size_t count = 0;
  for (const auto& kernels : trainer.kernels()) {
    if constexpr (requires { kernels.chosen_algorithms(); }) count += kernels.chosen_algorithms();
  }
  return count;
}

template <class Backend, class T>
void run(const Options& o, train_moe::RoutingWatch& watch, Outcome& outcome) {
  const train_moe::Text text(o.text, o.sequence, o.batch);
  Backend::run_ranks(o.mesh.world_size, std::chrono::seconds(30), [&](typename Backend::Comm& world) {
    const pleat::MeshComms comms(o.mesh, world);
    train_moe::Trainer<Backend, T> trainer(train_moe::groups_of(comms), o, text, &watch);
    const std::size_t rehearsed = chosen_algorithms(trainer);
    const StepReport report = trainer.compute_gradients();
    if (chosen_algorithms(trainer) != rehearsed) throw std::runtime_error("a product was not rehearsed");
    if (world.rank() == 0) outcome.report = report;
    train_moe::write_gradients(trainer, outcome.gradients);
    trainer.update();
    train_moe::write_parameters(trainer, outcome.parameters);
  });
}

/// One host rank in float64, which takes the experts of `record` where scores differ by less than `tie`. Returns how
/// often.
inline std::int64_t run_reference(Options o, RoutingRecord& record, double tie, Outcome& outcome) {
  o.micro_batch *= o.mesh.dp;
  o.mesh = {};
  o.schedule.reset();
  o.dtype = pleat::DType::f64;
  RoutingFollower follower(o, record, tie);
  run<train_moe::HostBackend, double>(o, follower, outcome);
  return follower.ties();
}

/// How far runs are from their references: 1 - 2 xy / (x^2 + y^2) of the worst parameter, and the relative L2 of each,
/// over the gradients of all runs as if they were one.
class Distance {
 public:
  double loss = 0, worst = 0;
  std::string worst_name;
  std::map<std::string, double> relative;

  void add(const Outcome& got, const Outcome& expected) {
    loss = std::max(loss, std::abs(got.report.loss - expected.report.loss) / expected.report.loss);
    for (const auto& [name, y] : expected.gradients.pages()) {
      const std::vector<double>& x = got.gradients.at(name);
      double xy = 0, xx = 0, yy = 0, off = 0;
      for (std::size_t i = 0; i < y.size(); ++i) {
        xy += x[i] * y[i], xx += x[i] * x[i], yy += y[i] * y[i];
        off += (x[i] - y[i]) * (x[i] - y[i]);
      }
      if (xx == 0 && yy == 0) continue;  // experts without tokens
      const double difference = 1 - 2 * xy / (xx + yy);
      // A NaN is the worst.
      if (!(difference <= worst)) worst = std::isnan(difference) ? INFINITY : difference, worst_name = name;
      auto& [off_of_all, of_all] = squares_[name];
      relative[name] = std::sqrt((off_of_all += off) / (of_all += yy));
    }
  }

 private:
  std::map<std::string, std::pair<double, double>> squares_;  // of differences, and of what was expected
};

/// The largest ratio of relative L2 distances; parameters that both have within `noise` are left out.
inline std::pair<double, std::string> worst_ratio(const Distance& mesh, const Distance& one, double noise) {
  std::pair<double, std::string> worst{0, ""};
  for (const auto& [name, off] : mesh.relative) {
    const auto own = one.relative.find(name);
    if (own == one.relative.end() || off <= noise) continue;
    const double ratio = off / std::max(own->second, 1e-12);
    if (!(ratio <= worst.first)) worst = {ratio, name};
  }
  return worst;
}
/// Of all gradients together.
inline double total(const Distance& d) {
  double sum = 0;
  for (const auto& [name, off] : d.relative) sum += off * off;
  return std::sqrt(sum / static_cast<double>(d.relative.size()));
}

inline bool same_bits(const Book& a, const Book& b) {
  for (const auto& [name, page] : a.pages()) {
    if (std::memcmp(page.data(), b.at(name).data(), page.size() * sizeof(double)) != 0) return false;
  }
  return a.pages().size() == b.pages().size();
}

struct Model {
  const char* name;
  std::vector<const char*> flags;
};
inline const Model models[] = {
    {"gqa",
     {"--layers", "4", "--hidden", "128", "--heads", "4", "--kv-heads", "2", "--head-dim", "64", "--experts", "16",
      "--top-k", "4", "--inner", "64"}},
    {"mla", {"--layers",   "4",  "--hidden",       "96", "--heads",       "4",  "--lora",  "32", "--nope-dim", "32",
             "--rope-dim", "16", "--value-dim",    "32", "--experts",     "16", "--top-k", "3",  "--inner",    "48",
             "--shared",   "1",  "--dense-layers", "1",  "--dense-inner", "160"}},
};

inline Options options_of(const TextFile& text, const Model& model, const char* mesh, const char* dtype,
                          std::vector<const char*> more) {
  // Four micro-batches on every mesh.
  const std::string micro_batch = std::to_string(16 / pleat::parse_mesh(mesh).dp / 4);
  std::vector<const char*> arguments{"train_moe", "--micro-batch", micro_batch.c_str(), "--mesh", mesh, "--dtype",
                                     dtype,       "--text",        text.name(),         "--seq",  "64", "--batch",
                                     "16"};
  arguments.insert(arguments.end(), model.flags.begin(), model.flags.end());
  arguments.insert(arguments.end(), more.begin(), more.end());
  bool help = false;
  return train_moe::parse_options(static_cast<int>(arguments.size()), arguments.data(), help);
}

template <class T>
struct Bar;
template <>
struct Bar<pleat::bfloat16> {
  static constexpr double loss = 1e-2, difference = 1e-2, tie = 5e-3, noise = 0;
};
template <>
struct Bar<float> {
  static constexpr double loss = 1e-6, difference = 1e-8, tie = 1e-5, noise = 1e-5;
};

inline int failures = 0;

/// So many runs, of other initial parameters each, say of every single gradient whether a mesh is further off than one
/// rank: of one run, a norm's hundred numbers lie as far off as chance has it, up to a third more or less.
inline constexpr int many_seeds = 24;

/// Runs a case from `seeds` initial parameters, prints its line, and returns its distance. Against `one`, that of one
/// rank, all gradients together may be 1.1 times as far off, and of many seeds each of them.
template <class Backend, class T>
Distance check(const TextFile& text, const Model& model, const char* mesh, std::vector<const char*> more,
               const Distance* one, int seeds = 1) {
  std::string what = std::string(model.name) + " " + pleat::name_of(pleat::dtype_of<T>) + " " + mesh;
  for (const char* flag : more) what += std::string(" ") + flag;
  if (seeds > 1) what += ", " + std::to_string(seeds) + " seeds";
  try {
    Distance d;
    double loss = 0;
    std::int64_t ties = 0;
    bool equal = true;
    for (int seed = 1; seed <= seeds; ++seed) {
      Options o = options_of(text, model, mesh, pleat::name_of(pleat::dtype_of<T>), more);
      o.seed = static_cast<std::uint64_t>(seed);
      RoutingRecord record(o, o.micro_batches());
      Outcome got, expected;
      run<Backend, T>(o, record, got);
      if (seed == 1) {
        Outcome again;
        run<Backend, T>(o, record, again);
        equal = same_bits(got.gradients, again.gradients) && same_bits(got.parameters, again.parameters) &&
                got.report.loss == again.report.loss;
        loss = got.report.loss;
      }
      ties += run_reference(o, record, Bar<T>::tie, expected);
      d.add(got, expected);
    }
    const auto [ratio, worst] = one == nullptr ? std::pair{1.0, std::string()} : worst_ratio(d, *one, Bar<T>::noise);
    const double of_all = one == nullptr ? 1 : total(d) / total(*one);
    const bool passes = d.loss <= Bar<T>::loss && d.worst <= Bar<T>::difference && equal && of_all <= 1.1 &&
                        (seeds < many_seeds || ratio <= 1.1);
    std::printf(
        "%-6s %-46s loss %.6f off %.1e  worst %.1e %-28s  L2 %.2e, x %.3f of one rank (worst x %.2f %s)  %lld ties%s\n",
        passes ? "ok" : "FAILED", what.c_str(), loss, d.loss, d.worst, d.worst_name.c_str(), total(d), of_all, ratio,
        worst.c_str(), static_cast<long long>(ties), equal ? "" : ", other BITS when repeated");
    failures += !passes;
    std::fflush(stdout);
    return d;
  } catch (const std::exception& e) {
    std::printf("FAILED %-46s %s\n", what.c_str(), e.what());
    std::fflush(stdout);
    ++failures;
    return {};
  }
}

/// A mesh, and what the run has besides.
struct Case {
  const char* mesh;
  std::vector<const char*> flags{};

  /// Those flags that say what is trained on, which a run on one rank shares.
  std::vector<const char*> data_flags() const {
    std::vector<const char*> data;
    for (const char* flag : flags) {
      if (std::strcmp(flag, "--packed") == 0 || std::strcmp(flag, "--ragged") == 0) data.push_back(flag);
    }
    return data;
  }
};

/// The exit code of a program: 0 when all cases passed, of one dtype and of both models, or of the one called `only`.
/// The first case runs from many seeds as well, where rounding is what is compared.
template <class Backend, class T>
int check_all(const char* only, const std::vector<Case>& cases) {
  const TextFile text;
  const bool quick = testing_support::is_quick();
  for (const Model& model : models) {
    if (only != nullptr && std::strcmp(only, model.name) != 0) continue;
    std::map<std::vector<std::string>, Distance> of_one_rank;
    for (const Case& one : cases) {
      const auto data = one.data_flags();
      const std::vector<std::string> key(data.begin(), data.end());
      if (!of_one_rank.contains(key)) {
        of_one_rank[key] = check<Backend, T>(text, model, "pp1-dp1-cp1-ep1", data, nullptr);
      }
      check<Backend, T>(text, model, one.mesh, one.flags, &of_one_rank.at(key));
      if (quick) break;
    }
    if (quick || std::is_same_v<T, float>) continue;
    const Distance one = check<Backend, T>(text, model, "pp1-dp1-cp1-ep1", {}, nullptr, many_seeds);
    check<Backend, T>(text, model, cases.front().mesh, cases.front().flags, &one, many_seeds);
  }
  std::printf("%s\n", failures == 0 ? "all passed" : "some FAILED");
  return failures == 0 ? 0 : 1;
}

}  // namespace train_moe_testing
