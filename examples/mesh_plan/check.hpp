// Estimates beside measurements: a table of configurations that ran.
#pragma once

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>

#include <pleat/checkpoint/json.hpp>

#include "options.hpp"

namespace mesh_plan {

/// A configuration and what was measured of it.
struct Measured {
  Request request;
  std::optional<double> peak_gib, step_ms;
};

inline std::vector<std::string> cells(const std::string& line) {
  std::vector<std::string> all;
  std::stringstream stream(line);
  for (std::string cell; std::getline(stream, cell, ',');) {
    const auto first = cell.find_first_not_of(" \t\r"), last = cell.find_last_not_of(" \t\r");
    all.push_back(first == std::string::npos ? "" : cell.substr(first, last - first + 1));
  }
  return all;
}

inline double measured_number(const std::string& name, const std::string& text) {
  const auto value = number<double>(name, text);
  if (!(value > 0 && value <= 1e12)) {
    pleat::fail<pleat::shape_error>("pleat[N06]: ", name, " ", text, " was not measured; valid: above 0, up to 1e12");
  }
  return value;
}
/// What a run had for the setting `name`, or what was measured of it, if not empty. Errors: shape_error N06 for a
/// measured 0, and those of settings.
inline void set_cell(Measured& run, const std::string& name, const std::string& value) {
  if (name == "peak-gib") {
    if (!value.empty()) run.peak_gib = measured_number(name, value);
  } else if (name == "step-ms") {
    if (!value.empty()) run.step_ms = measured_number(name, value);
  } else {
    set(run.request, name, value);
  }
}
/// As many ranks as its mesh has.
inline Measured finished(Measured run) {
  run.request.job.world = pleat::parse_mesh(run.request.mesh).world_size;
  return run;
}

/// Errors: shape_error N06 for a column that is no setting, as where the file is no table at all.
inline void check_column(const std::string& name) {
  const auto all = settings();
  const bool is_known = name == "peak-gib" || name == "step-ms" ||
                        std::any_of(all.begin(), all.end(), [&](const Setting& known) { return known.name == name; });
  if (!is_known) {
    pleat::fail<pleat::shape_error>("pleat[N06]: the first line of measured runs names a column \"", name.substr(0, 40),
                                    "\"; valid: the settings of --help, peak-gib and step-ms");
  }
}

/// CSV: the first line names the columns; empty lines and those that begin with # are left out.
inline std::vector<Measured> read_csv(const std::string& text, const Request& defaults) {
  std::vector<Measured> all;
  std::vector<std::string> columns;
  std::istringstream in(text);
  int line_number = 0;
  for (std::string line; std::getline(in, line);) {
    ++line_number;
    const std::vector<std::string> row = cells(line);
    if (row.empty() || row.front().substr(0, 1) == "#" || (row.size() == 1 && row.front().empty())) continue;
    if (columns.empty()) {
      for (const std::string& name : row) check_column(name);
      columns = row;
      continue;
    }
    if (row.size() != columns.size()) {
      pleat::fail<pleat::shape_error>("pleat[N06]: line ", line_number, " has ", row.size(),
                                      " cells where the first has ", columns.size());
    }
    Measured run{defaults, {}, {}};
    for (std::size_t c = 0; c < row.size(); ++c) set_cell(run, columns[c], row[c]);
    all.push_back(finished(std::move(run)));
  }
  return all;
}
/// JSON: an array of objects whose members are what CSV has as columns.
inline std::vector<Measured> read_json(const std::string& text, const Request& defaults) {
  std::vector<Measured> all;
  const std::string where = "the file of measured runs";
  pleat::checkpoint::JsonReader json(text, where);
  json.array([&] {
    Measured run{defaults, {}, {}};
    json.object([&](const std::string& name) { set_cell(run, name, json.text()); });
    all.push_back(finished(std::move(run)));
  });
  json.end();
  return all;
}
/// Opens the file of measured runs. Errors: shape_error N06.
inline std::ifstream open_measured(const std::string& name) {
  std::ifstream file(name);
  if (!file || std::filesystem::is_directory(name)) {
    pleat::fail<pleat::shape_error>("pleat[N06]: check ", name, " cannot be read; name a file of measured runs");
  }
  return file;
}
/// Reads measured runs, JSON where the text begins with [, else CSV. What a run does not set is as in `defaults`.
/// Errors: shape_error N06 for a column that is none, a line that is not like the first, or no run at all;
/// checkpoint_error K01 for what is no JSON; those of settings.
inline std::vector<Measured> read_measured(std::istream& in, const Request& defaults) {
  const std::string text(std::istreambuf_iterator<char>(in), {});
  const std::size_t first = text.find_first_not_of(" \t\r\n");
  const bool is_json = first != std::string::npos && text[first] == '[';
  std::vector<Measured> all = is_json ? read_json(text, defaults) : read_csv(text, defaults);
  if (all.empty()) pleat::fail<pleat::shape_error>("pleat[N06]: no measured run; a first line names CSV's columns");
  return all;
}

/// Estimates beside what was measured.
struct Comparison {
  std::string table;
  double worst_percent = 0, worst_time_percent = 0;
};
inline Comparison compare(const std::vector<Measured>& all) {
  using pleat::estimate::detail::fixed, pleat::estimate::detail::left;
  Comparison made;
  made.table = left("mesh", 24) + left("layers", 16) +
               "sequence   GiB: estimate   measured      off    ms: at least   expected   measured      off\n";
  int compared = 0, timed = 0;
  const auto off = [](double estimate, double measured, double& worst, int& count) {
    const double percent = 100 * (estimate / measured - 1);
    worst = std::max(worst, std::abs(percent));
    ++count;
    return percent;
  };
  for (const Measured& m : all) {
    const pleat::estimate::Job& job = m.request.job;
    pleat::estimate::Planner planner(job);
    const auto estimate = planner.estimate(pleat::parse_mesh(m.request.mesh));
    const double gib = estimate.memory.total() / (1 << 30), ms = estimate.time.seconds.expected * 1e3;
    std::string memory(20, ' '), time;
    if (m.peak_gib) {
      memory = fixed(*m.peak_gib, 3, 11) + fixed(off(gib, *m.peak_gib, made.worst_percent, compared), 2, 8) + '%';
    }
    if (m.step_ms) {
      time = fixed(*m.step_ms, 2, 11) + fixed(off(ms, *m.step_ms, made.worst_time_percent, timed), 1, 8) + '%';
    }
    made.table += left(m.request.mesh, 24) +
                  left(std::to_string(job.model.layers) + " of " + std::to_string(job.model.hidden), 16) +
                  fixed(static_cast<double>(job.sequence), 0, 8) + fixed(gib, 3, 16) + memory +
                  fixed(estimate.time.seconds.bound * 1e3, 2, 16) + fixed(ms, 2, 11) + time + '\n';
  }
  const auto sum_up = [&](const char* what, double worst, int count) {
    if (count == 0) return;
    made.table +=
        std::string(what) + ": at most " + fixed(worst, 2) + " % off in " + std::to_string(count) + " configurations\n";
  };
  sum_up("memory", made.worst_percent, compared);
  sum_up("time", made.worst_time_percent, timed);
  return made;
}

}  // namespace mesh_plan
