// What all ranks of a run share, and what rank 0 prints and logs of it.
#pragma once

#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <string>

#include "check.hpp"
#include "step_times.hpp"

extern const char train_moe_commit[];

namespace train_moe {

class Run {
 public:
  Options options;
  Text text;
  std::string name;  // of this start
  std::ofstream json;
  RoutingRecord record;
  Book parameters, gradients;
  Differences differences;
  std::int64_t ties = 0;

  explicit Run(const Options& o)
      : options(o), text(o.text, o.sequence, o.batch), name(new_name()), record(o, o.micro_batches()) {
    open(json, "--json", o.json);
    open(times_, "--times", o.times);
  }

  /// `times`: where the step's time went on rank 0.
  void show_step(std::int64_t step, const StepReport& report, const StepSeconds& times, double seconds,
                 std::int64_t peak_bytes) {
    const double speed = static_cast<double>(report.tokens) / seconds;
    const double tflops = 1e-12 * report.flops / seconds / options.mesh.world_size;
    if (!options.quiet) {
      const std::string share =
          options.peak_tflops > 0 ? formatted(" (%.1f %%)", 100 * tflops / options.peak_tflops) : "";
      std::printf(
          "step %3lld/%d  loss %.6f  balance %.6f  norm %.6f  lr %.2e  %8.0f tokens/s  %.4g TFLOP/s%s  %.1f MiB\n",
          static_cast<long long>(step), options.steps, report.loss, report.balance, report.norm, report.learning_rate,
          speed, tflops, share.c_str(), static_cast<double>(peak_bytes) / 0x1p20);
      std::printf("  ms: forward %.1f  backward %.1f  pairs %.1f  waiting %.1f  norm %.1f  update %.1f  of %.1f\n",
                  1e3 * times.forward, 1e3 * times.backward, 1e3 * times.pairs, 1e3 * times.waiting, 1e3 * times.norm,
                  1e3 * times.update, 1e3 * seconds);
      std::fflush(stdout);
    }
    if (!json.is_open()) return;
    std::string routing;
    if (options.log_routing) {
      routing = formatted("%016llx", static_cast<unsigned long long>(record.take_digest(step - 1)));
    }
    json << formatted("{\"step\": %lld, \"tokens\": %lld", static_cast<long long>(step),
                      static_cast<long long>(report.tokens))
         << number("loss", "%.17g", report.loss) << number("balance", "%.17g", report.balance)
         << number("norm", "%.17g", report.norm) << number("lr", "%.17g", report.learning_rate)
         << number("seconds", "%.6f", seconds) << number("tokens_per_second", "%.1f", speed)
         << number("tflops", "%.6g", tflops) << number("forward", "%.6f", times.forward)
         << number("backward", "%.6f", times.backward) << number("pairs", "%.6f", times.pairs)
         << number("waiting", "%.6f", times.waiting) << number("gradient_norm", "%.6f", times.norm)
         << number("update", "%.6f", times.update)
         << formatted(", \"peak_bytes\": %lld, \"routing\": \"%s\", \"commit\": \"%s\"}\n",
                      static_cast<long long>(peak_bytes), routing.c_str(), train_moe_commit)
         << std::flush;
    require_written(json, "--json " + options.json);
  }

  /// Of the operations of the last step, rank of the pipeline after rank: "start finish".
  void write_times(const std::vector<std::vector<pleat::pipeline::Span>>& ranks) {
    for (const auto& rank : ranks) {
      for (const pleat::pipeline::Span& span : rank) times_ << formatted("%.9g %.9g\n", span.start, span.finish);
    }
    require_written(times_ << std::flush, "--times " + options.times);
  }

 private:
  static std::string new_name() {
    const auto now = std::chrono::system_clock::now().time_since_epoch();
    return std::to_string(std::chrono::duration_cast<std::chrono::milliseconds>(now).count()) + "-" +
           std::to_string(::getpid());
  }
  template <class... Values>
  static std::string formatted(const char* format, Values... values) {
    char text[640];
    std::snprintf(text, sizeof(text), format, values...);
    return text;
  }
  /// A member of a line of JSON, which has no NaN and no infinity: null.
  static std::string number(const char* name, const char* format, double value) {
    return formatted(", \"%s\": ", name) + (std::isfinite(value) ? formatted(format, value) : "null");
  }
  /// Where a file is named, before anything is trained. Errors: usage_error.
  static void open(std::ofstream& file, const std::string& flag, const std::string& name) {
    if (name.empty()) return;
    file.open(name);
    if (!file) throw usage_error(flag + " " + name + " cannot be written; name a file in a folder that exists");
  }
  static void require_written(const std::ostream& file, const std::string& what) {
    if (!file) throw std::runtime_error(what + " could not be written: is its disk full?");
  }

  std::ofstream times_;
};

}  // namespace train_moe
