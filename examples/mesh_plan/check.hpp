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

inline std::string check_table(const std::vector<Measured>& all) {
  using pleat::estimate::detail::fixed, pleat::estimate::detail::left;
  std::string text = left("mesh", 24) + left("model", 18) +
                     "sequence  GiB estimated   measured     off    step ms at least   measured   times\n";
  double worst = 0;
  int compared = 0;
  for (const Measured& m : all) {
    const pleat::estimate::Job& job = m.request.job;
    pleat::estimate::Planner planner(job);
    const auto made = planner.estimate(pleat::parse_mesh(m.request.mesh));
    const double gib = made.memory.total() / (1 << 30), ms = made.step_seconds * 1e3;
    text += left(m.request.mesh, 24) + left(job.model.name, 18) + fixed(static_cast<double>(job.sequence), 0, 8) +
            fixed(gib, 3, 15);
    if (m.peak_gib) {
      const double off = 100 * (gib / *m.peak_gib - 1);
      worst = std::max(worst, std::abs(off));
      ++compared;
      text += fixed(*m.peak_gib, 3, 11) + fixed(off, 1, 7) + " %";
    } else {
      text += left("", 20);
    }
    text += fixed(ms, 2, 18);
    if (m.step_ms) text += fixed(*m.step_ms, 2, 11) + fixed(*m.step_ms / ms, 2, 8);
    text += '\n';
  }
  if (compared > 0) {
    text += "memory: " + fixed(worst, 1) + " % off at most, of " + std::to_string(compared) + " configurations\n";
  }
  return text;
}

}  // namespace mesh_plan
