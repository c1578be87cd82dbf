// The cases of the trainer's programs on GPUs: loss and every gradient against one host rank in float64 that takes the
// same experts, against what one GPU rank achieves, and the same bits twice.
#include "train_moe_cases.hpp"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <future>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <string>

#include <unistd.h>

#include <pleat/mesh/text.hpp>
#include <support/repeats.hpp>

extern const char train_moe_commit[];
const char train_moe_commit[] = "none";

namespace train_moe_testing {
namespace {

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

/// How far runs are from their references: 1 - 2 xy / (x^2 + y^2) of the worst parameter, and the relative L2 of each,
/// over the gradients of all batches as if they were one.
class Distance {
 public:
  double loss = 0, worst = 0;
  std::string worst_name;
  std::map<std::string, double> relative;

  void add(const Outcome::Step& got, const Outcome::Step& expected) {
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
std::pair<double, std::string> worst_ratio(const Distance& mesh, const Distance& one, double noise) {
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
double total(const Distance& d) {
  double sum = 0;
  for (const auto& [name, off] : d.relative) sum += off * off;
  return std::sqrt(sum / static_cast<double>(d.relative.size()));
}

bool same_bits(const Book& a, const Book& b) {
  for (const auto& [name, page] : a.pages()) {
    if (std::memcmp(page.data(), b.at(name).data(), page.size() * sizeof(double)) != 0) return false;
  }
  return a.pages().size() == b.pages().size();
}

struct Model {
  const char* name;
  std::vector<const char*> flags;
};
const Model models[] = {
    {"gqa",
     {"--layers", "4", "--hidden", "128", "--heads", "4", "--kv-heads", "2", "--head-dim", "64", "--experts", "16",
      "--top-k", "4", "--inner", "64"}},
    {"mla", {"--layers",   "4",  "--hidden",       "96", "--heads",       "4",  "--lora",  "32", "--nope-dim", "32",
             "--rope-dim", "16", "--value-dim",    "32", "--experts",     "16", "--top-k", "3",  "--inner",    "48",
             "--shared",   "1",  "--dense-layers", "1",  "--dense-inner", "160"}},
};

Options options_of(const TextFile& text, const Model& model, const char* mesh, const char* dtype,
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

/// What is asked of a dtype, over so many batches.
struct Bar {
  double loss, difference, tie, noise;
  int batches;
};
Bar bar_of(pleat::DType dtype) {
  if (dtype == pleat::DType::bf16) return {.loss = 1e-2, .difference = 1e-2, .tie = 5e-3, .noise = 0, .batches = 24};
  return {.loss = 1e-6, .difference = 1e-8, .tie = 1e-5, .noise = 1e-5, .batches = 2};
}

/// From so many batches on, every single gradient may be 1.1 times as far off as one rank's: of one batch, the hundred
/// numbers of a norm lie as far off as chance has it, up to a third more or less.
constexpr int many_batches = 24;
constexpr const char* one_rank = "pp1-dp1-cp1-ep1";

/// Those flags that say what is trained on, which a run on one rank shares.
std::vector<const char*> data_flags(const Case& of) {
  std::vector<const char*> data;
  for (const char* flag : of.flags) {
    if (std::strcmp(flag, "--packed") == 0 || std::strcmp(flag, "--ragged") == 0) data.push_back(flag);
  }
  return data;
}

/// What is run, and how it went so far. While the references of one case are computed, the next runs.
class Program {
 public:
  Program(RunSteps run, pleat::DType dtype) : run_(run), dtype_(dtype), bar_(bar_of(dtype)) {
    if (testing_support::is_quick()) bar_.batches = 1;
  }

  void check(const Model& model, const Case& of) {
    const auto ran = std::make_shared<Ran>(*this, model, of);
    finish();
    comparing_ = std::async(std::launch::async, [this, ran] { compare(*ran); });
  }
  /// The number of cases that failed.
  int finish() {
    if (comparing_.valid()) comparing_.get();
    return failures_;
  }

 private:
  /// A case as it ran. The last batch is repeated from the beginning.
  struct Ran {
    std::string what, of_one, error;  // its name, and that of the same on one rank
    Options o;
    Records records;
    Outcome got;
    bool is_repeated = false;

    Ran(const Program& in, const Model& model, const Case& of)
        : what(in.name_of(model, of)),
          of_one(in.name_of(model, {one_rank, data_flags(of)})),
          o(options_of(in.text_, model, of.mesh, pleat::name_of(in.dtype_), of.flags)),
          records(o, in.bar_.batches, [&](auto& list, int) { list.emplace_back(o, o.micro_batches()); }) {
      try {
        std::vector<int> all(static_cast<std::size_t>(in.bar_.batches));
        std::iota(all.begin(), all.end(), 0);
        Outcome again;
        in.run_(o, records, all, got);
        in.run_(o, records, {all.back()}, again);
        is_repeated = same_bits(got.steps.back().gradients, again.steps.front().gradients) &&
                      same_bits(got.parameters, again.parameters) &&
                      got.steps.back().report.loss == again.steps.front().report.loss;
      } catch (const std::exception& e) {
        error = e.what();
      }
    }
  };

  std::string name_of(const Model& model, const Case& of) const {
    std::string name = std::string(model.name) + " " + pleat::name_of(dtype_) + " " + of.mesh;
    for (const char* flag : of.flags) name += std::string(" ") + flag;
    return name;
  }

  /// Prints the line of a case. All its gradients together may be 1.1 times as far off as those of one rank, and of
  /// many batches each of them.
  void compare(Ran& ran) {
    Distance& d = distances_[ran.what];
    try {
      if (!ran.error.empty()) throw std::runtime_error(ran.error);
      const std::int64_t ties = run_references(
          ran.o, ran.records, bar_.batches, bar_.tie,
          [&](int batch, const Outcome::Step& step) { d.add(ran.got.steps[static_cast<std::size_t>(batch)], step); });
      const Distance& one = distances_.at(ran.of_one);
      const auto [ratio, worst] = worst_ratio(d, one, bar_.noise);
      const double of_all = total(d) / total(one);
      const bool passes = d.loss <= bar_.loss && d.worst <= bar_.difference && ran.is_repeated && of_all <= 1.1 &&
                          (bar_.batches < many_batches || ratio <= 1.1);
      std::printf(
          "%-6s %-46s loss %.6f off %.1e  worst %.1e %-28s  L2 %.2e, x %.3f of one rank (worst x %.3f %s)  %lld "
          "ties%s\n",
          passes ? "ok" : "FAILED", ran.what.c_str(), ran.got.steps.front().report.loss, d.loss, d.worst,
          d.worst_name.c_str(), total(d), of_all, ratio, worst.c_str(), static_cast<long long>(ties),
          ran.is_repeated ? "" : ", other BITS when repeated");
      failures_ += !passes;
    } catch (const std::exception& e) {
      std::printf("FAILED %-46s %s\n", ran.what.c_str(), e.what());
      ++failures_;
    }
    std::fflush(stdout);
  }

  TextFile text_;
  RunSteps run_;
  pleat::DType dtype_;
  Bar bar_;
  std::map<std::string, Distance> distances_;  // by case
  int failures_ = 0;
  std::future<void> comparing_;
};

}  // namespace

int check_all(RunSteps run, pleat::DType dtype, const std::vector<Case>& cases, const char* only) {
  Program program(run, dtype);
  const auto start = std::chrono::steady_clock::now();
  for (const Model& model : models) {
    if (only != nullptr && std::strcmp(only, model.name) != 0) continue;
    std::set<std::vector<std::string>> alone;  // what one rank has run
    for (const Case& of : cases) {
      const auto data = data_flags(of);
      if (alone.insert({data.begin(), data.end()}).second) program.check(model, {one_rank, data});
      program.check(model, of);
      if (testing_support::is_quick()) break;
    }
  }
  const int failures = program.finish();
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  std::printf("%s, %.0f s\n", failures == 0 ? "all passed" : "some FAILED", seconds.count());
  return failures == 0 ? 0 : 1;
}

const std::vector<Case> thread_cases{
    {"pp1-dp2-cp2-ep4"},
    {"pp1-dp2-cp1-ep2"},
    {"pp1-dp1-cp2-ep2"},
    {"pp1-dp2-cp2-ep2-r2"},
    {"pp1-dp4-cp2-ep8"},
    {"pp1-dp2-cp2-ep4", {"--transport", "collective"}},
    {"pp1-dp2-cp2-ep4", {"--schedule", "1f1b-pairs"}},
    {"pp1-dp2-cp2-ep4", {"--packed", "--ragged"}},
    {"pp2-dp2-cp2-ep4"},
    {"pp2-dp2-cp2-ep4", {"--schedule", "1f1b"}},
    {"pp2-dp2-cp1-ep2"},
    {"pp2-dp2-cp1-ep2", {"--packed"}},
    {"pp2-dp2-cp1-ep2", {"--ragged"}},
    {"pp2-dp2-cp1-ep2", {"--packed", "--ragged"}},
    {"pp2-dp1-cp2-ep2", {"--schedule", "dualpipev"}},
    {"pp2-dp1-cp2-ep2", {"--packed", "--schedule", "1f1b"}},
    {"pp2-dp1-cp2-ep2", {"--ragged", "--schedule", "1f1b-pairs"}},
    {"pp2-dp1-cp2-ep2", {"--packed", "--ragged"}},
    {"pp2-dp1-cp4-ep2"},
    {"pp2-dp1-cp4-ep2", {"--packed"}},
    {"pp2-dp1-cp4-ep2", {"--ragged"}},
    {"pp2-dp1-cp4-ep2", {"--packed", "--ragged"}},
    {"pp2-dp2-cp2-ep4", {"--packed", "--ragged", "--schedule", "dualpipev", "--optimizer", "muon"}}};

const std::vector<Case> nccl_cases{
    {"pp1-dp1-cp2-ep2"},
    {"pp1-dp2-cp1-ep2"},
    {"pp1-dp2-cp1-ep1-r2"},
    {"pp1-dp1-cp2-ep2", {"--transport", "collective"}},
    {"pp1-dp2-cp1-ep2", {"--schedule", "1f1b-pairs"}},
    {"pp2-dp1-cp1-ep1"},
    {"pp2-dp1-cp1-ep1", {"--schedule", "1f1b"}},
    {"pp2-dp1-cp1-ep1", {"--schedule", "dualpipev"}},
    {"pp1-dp1-cp2-ep2", {"--packed", "--ragged"}},
    {"pp2-dp1-cp1-ep1", {"--packed", "--ragged", "--schedule", "dualpipev", "--optimizer", "muon"}}};

}  // namespace train_moe_testing
