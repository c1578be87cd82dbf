// Estimates beside measurements: a table of configurations that ran.
#pragma once

#include <fstream>
#include <optional>
#include <sstream>

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

/// Reads CSV whose first line names the columns; empty lines and those that begin with # are left out. What a line does
/// not set is as in `defaults`. Errors: shape_error N06 for a line that is not like the first, and those of settings.
inline std::vector<Measured> read_measured(std::istream& in, const Request& defaults) {
  std::vector<Measured> all;
  std::vector<std::string> columns;
  int line_number = 0;
  for (std::string line; std::getline(in, line);) {
    ++line_number;
    const std::vector<std::string> row = cells(line);
    if (row.empty() || row.front().substr(0, 1) == "#" || (row.size() == 1 && row.front().empty())) continue;
    if (columns.empty()) {
      columns = row;
      continue;
    }
    if (row.size() != columns.size()) {
      pleat::fail<pleat::shape_error>("pleat[N06]: line ", line_number, " has ", row.size(),
                                      " cells where the first has ", columns.size());
    }
    Measured measured{defaults, {}, {}};
    for (std::size_t c = 0; c < row.size(); ++c) {
      if (columns[c] == "peak-gib") {
        measured.peak_gib = number<double>("peak-gib", row[c]);
      } else if (columns[c] == "step-ms") {
        measured.step_ms = number<double>("step-ms", row[c]);
      } else {
        set(measured.request, columns[c], row[c]);
      }
    }
    const pleat::RuntimeMesh mesh = pleat::parse_mesh(measured.request.mesh);
    measured.request.job.world = mesh.world_size;
    all.push_back(std::move(measured));
  }
  if (all.empty()) pleat::fail<pleat::shape_error>("pleat[N06]: no measured line; the first names the columns");
  return all;
}

/// Estimates beside what was measured.
struct Comparison {
  std::string table;
  double worst_percent = 0;  ///< of memory
};
inline Comparison compare(const std::vector<Measured>& all) {
  using pleat::estimate::detail::fixed, pleat::estimate::detail::left;
  Comparison made;
  made.table = left("mesh", 24) + left("layers", 16) +
               "sequence   GiB: estimate   measured      off    ms: at least   measured   times\n";
  int compared = 0;
  for (const Measured& m : all) {
    const pleat::estimate::Job& job = m.request.job;
    pleat::estimate::Planner planner(job);
    const auto estimate = planner.estimate(pleat::parse_mesh(m.request.mesh));
    const double gib = estimate.memory.total() / (1 << 30), ms = estimate.step_seconds * 1e3;
    std::string memory(20, ' '), time;
    if (m.peak_gib) {
      const double percent = 100 * (gib / *m.peak_gib - 1);
      memory = fixed(*m.peak_gib, 3, 11) + fixed(percent, 2, 8) + '%';
      made.worst_percent = std::max(made.worst_percent, std::abs(percent));
      ++compared;
    }
    if (m.step_ms) time = fixed(*m.step_ms, 2, 11) + fixed(*m.step_ms / ms, 2, 8);
    made.table += left(m.request.mesh, 24) +
                  left(std::to_string(job.model.layers) + " of " + std::to_string(job.model.hidden), 16) +
                  fixed(static_cast<double>(job.sequence), 0, 8) + fixed(gib, 3, 16) + memory + fixed(ms, 2, 16) +
                  time + '\n';
  }
  if (compared > 0) {
    made.table += "memory: at most " + fixed(made.worst_percent, 2) + " % off in " + std::to_string(compared) +
                  " configurations\n";
  }
  return made;
}

}  // namespace mesh_plan
