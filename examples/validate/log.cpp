// Reading and gating logs.
#include "log.hpp"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>

#include "options.hpp"

namespace validate {
namespace {

/// What follows `"name": ` in a line of JSON, up to the next comma or brace, without quotes; empty when there is none.
std::string field(const std::string& line, const std::string& name) {
  const std::string mark = "\"" + name + "\": ";
  const std::size_t at = line.find(mark);
  if (at == std::string::npos) return {};
  const std::size_t begin = at + mark.size();
  std::string value = line.substr(begin, line.find_first_of(",}", begin) - begin);
  if (value.size() >= 2 && value.front() == '"') value = value.substr(1, value.size() - 2);
  return value;
}

double number(const std::string& file, const std::string& line, const std::string& name) {
  const std::string text = field(line, name);
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != '\0' || !std::isfinite(value)) {
    throw train_moe::usage_error(file + ": \"" + name + "\" is no finite number in: " + line);
  }
  return value;
}

}  // namespace

Log read_log(const std::string& file, int first, int last) {
  std::ifstream in(file);
  if (!in) throw train_moe::usage_error(file + " cannot be read");
  Log log;
  for (std::string line; std::getline(in, line);) {
    Entry entry;
    entry.step = static_cast<int>(number(file, line, "step"));
    const int wanted = first + static_cast<int>(log.entries.size());
    if (entry.step != wanted) {
      throw train_moe::usage_error(file + " has step " + std::to_string(entry.step) + " where step " +
                                   std::to_string(wanted) + " belongs; valid: " + std::to_string(first) + " to " +
                                   std::to_string(last) + ", once each and in order");
    }
    entry.loss = number(file, line, "loss");
    entry.balance = number(file, line, "balance");
    entry.norm = number(file, line, "norm");
    entry.seconds = number(file, line, "seconds");
    entry.peak_bytes = number(file, line, "peak_bytes");
    entry.routing = field(line, "routing");
    const std::string commit = field(line, "commit");
    if (commit.empty() || (!log.commit.empty() && commit != log.commit)) {
      throw train_moe::usage_error(
          file + ": step " + std::to_string(entry.step) +
          (commit.empty() ? " names no commit" : " is of another commit than the steps before"));
    }
    log.commit = commit;
    log.entries.push_back(entry);
  }
  if (const int steps = last - first + 1; static_cast<int>(log.entries.size()) != steps) {
    throw train_moe::usage_error(file + " holds " + std::to_string(log.entries.size()) + " of " +
                                 std::to_string(steps) + " steps");
  }
  return log;
}

std::vector<std::size_t> steps_alike(const Log& a, const Log& b) {
  std::vector<std::size_t> alike;
  for (std::size_t i = 0; i < std::min(a.entries.size(), b.entries.size()); ++i) {
    if (a.entries[i].routing == b.entries[i].routing) alike.push_back(i);
  }
  return alike;
}

void require_one_commit(const std::vector<Log>& logs) {
  for (const Log& log : logs) {
    if (log.commit != logs.front().commit) {
      throw train_moe::usage_error("logs of two commits, " + logs.front().commit + " and " + log.commit);
    }
  }
}

}  // namespace validate
