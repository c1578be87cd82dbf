// What comm_bench prints: a table of rows, the bars they are held to, and the same rows as lines of JSON.
#pragma once

#include <cstddef>
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace comm_bench {

/// One measured row. `bytes`: what each rank sends (or what a leaf reads); 0 where there is none.
struct Row {
  std::string operation, way;
  std::size_t bytes = 0;
  double us = 0;
  double gb_per_s = 0;
  double floor_us = 0;  // of the bare transfer or kernel beside it; 0 for none
};
/// A row's limit; `text` says how it is made up.
struct Bar {
  std::string text;
  double limit_us;
};

class Report {
 public:
  /// Rank 0 prints. Bars are those of two GPUs: other numbers of ranks are held to none. `json_path` empty: no file;
  /// lines are added to it.
  Report(int rank, int ranks, std::string mode, const std::string& json_path)
      : prints_(rank == 0), ranks_(ranks), mode_(std::move(mode)) {
    if (!prints_ || json_path.empty()) return;
    json_.reset(std::fopen(json_path.c_str(), "a"));
    if (json_ == nullptr) throw std::runtime_error("cannot open " + json_path);
  }

  void title(const char* text) {
    title_ = text;
    if (!prints_) return;
    std::printf("\n%s (%d %s)\n%-18s %-24s %9s %10s %8s %10s %6s  %s\n", text, ranks_, mode_.c_str(), "operation",
                "way", "bytes", "us", "GB/s", "floor us", "ratio", "bars");
  }
  void add(const Row& row, const std::vector<Bar>& bars = {}) {
    if (!prints_) return;
    std::printf("%-18s %-24s %9s %10.2f %8.1f", row.operation.c_str(), row.way.c_str(), size(row.bytes).c_str(), row.us,
                row.gb_per_s);
    if (row.floor_us > 0) std::printf(" %10.2f %6.3f", row.floor_us, row.us / row.floor_us);
    if (json_) {
      std::fprintf(json_.get(),
                   "{\"ranks\":%d,\"mode\":\"%s\",\"title\":\"%s\",\"operation\":\"%s\",\"way\":\"%s\",\"bytes\":%zu,"
                   "\"us\":%.3f,\"gb_"
                   "per_s\":%.2f,"
                   "\"floor_us\":%.3f,\"bars\":[",
                   ranks_, mode_.c_str(), title_.c_str(), row.operation.c_str(), row.way.c_str(), row.bytes, row.us,
                   row.gb_per_s, row.floor_us);
    }
    is_first_bar_ = true;
    if (ranks_ == 2) {
      for (const Bar& bar : bars) add_bar(row, bar);
    }
    std::printf("\n");
    std::fflush(stdout);
    if (json_) std::fprintf(json_.get(), "]}\n"), std::fflush(json_.get());
  }
  /// A line below a row, as printf makes it.
  template <class... Args>
  void line(const char* format, Args... args) const {
    if (!prints_) return;
    std::printf(format, args...);
    std::printf("\n");
  }
  /// Prints how many bars hold; the exit code: 3 when one is missed and `check` asks for it.
  int verdict(bool check) const {
    line("\n%s: %d of %d bars hold", mode_.c_str(), bars_ - missed_, bars_);
    return check && missed_ > 0 ? 3 : 0;
  }

 private:
  struct Close {
    void operator()(std::FILE* file) const { (void)std::fclose(file); }
  };

  void add_bar(const Row& row, const Bar& bar) {
    const bool holds = row.us <= bar.limit_us;
    ++bars_;
    missed_ += holds ? 0 : 1;
    std::printf("  %s %s %.2f", holds ? "pass:" : "FAIL:", bar.text.c_str(), bar.limit_us);
    if (json_) {
      std::fprintf(json_.get(), "%s{\"bar\":\"%s\",\"limit_us\":%.3f,\"holds\":%s}", is_first_bar_ ? "" : ",",
                   bar.text.c_str(), bar.limit_us, holds ? "true" : "false");
    }
    is_first_bar_ = false;
  }
  static std::string size(std::size_t bytes) {
    if (bytes == 0) return "-";
    if (bytes % (std::size_t{1} << 20) == 0) return std::to_string(bytes >> 20) + " MiB";
    if (bytes % (std::size_t{1} << 10) == 0) return std::to_string(bytes >> 10) + " KiB";
    return std::to_string(bytes);
  }

  bool prints_;
  int ranks_;
  std::string mode_, title_;
  std::unique_ptr<std::FILE, Close> json_;
  bool is_first_bar_ = true;
  int bars_ = 0, missed_ = 0;
};

}  // namespace comm_bench
