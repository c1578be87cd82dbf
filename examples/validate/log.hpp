// Logs of runs, and the gate that they pass before anything is computed from them.
#pragma once

#include <string>
#include <vector>

namespace validate {

/// One step of a run.
struct Entry {
  int step = 0;
  double loss = 0, balance = 0, norm = 0;
  double seconds = 0;
  double peak_bytes = 0;
  std::string routing;  // digest of the experts that tokens took, where it was logged
};

/// A run that passed the gate.
struct Log {
  std::string commit;
  std::vector<Entry> entries;  // of the steps, in order

  std::vector<double> column(double Entry::*member) const {
    std::vector<double> values;
    for (const Entry& entry : entries) values.push_back(entry.*member);
    return values;
  }
  std::vector<double> column(double Entry::*member, const std::vector<std::size_t>& of) const {
    std::vector<double> values;
    for (const std::size_t i : of) values.push_back(entries[i].*member);
    return values;
  }
};

/// Reads what `train_moe --json` wrote. Errors: usage_error unless it holds the steps `first` to `last` once each and
/// in order, all of finite numbers, and names the one commit that it ran.
Log read_log(const std::string& file, int first, int last);

/// The steps in which tokens took the same experts in both logs. A token between two experts with equal scores takes
/// either: that is no rounding of a curve, and makes a step of its own.
std::vector<std::size_t> steps_alike(const Log& a, const Log& b);

/// Errors: usage_error unless all logs are of the same commit.
void require_one_commit(const std::vector<Log>& logs);

}  // namespace validate
