// Plans a training job: which meshes can run it, what each takes on the rank that takes most, and what would help.
#include <ctime>
#include <iostream>

#include "check.hpp"

namespace {

using namespace mesh_plan;
using pleat::estimate::Planner;
using pleat::estimate::Row;

void write(const std::string& name, const std::string& text) {
  if (name.empty()) return;
  std::ofstream file(name);
  file << text;
  if (!file.flush()) throw std::runtime_error("cannot write " + name);
  std::cout << "wrote " << name << '\n';
}

struct Planned {
  std::vector<Row> rows;
  double seconds = 0;  ///< of a processor, for each mesh
};

/// Estimates of all meshes, sorted; with advice for the first `top`.
Planned plan(const Request& request) {
  Planner planner(request.job);
  std::vector<pleat::estimate::Estimate> all;
  const std::clock_t start = std::clock();
  if (request.mesh.empty()) {
    for (const pleat::RuntimeMesh& mesh : legal_meshes(request.job, request.wanted))
      all.push_back(planner.estimate(mesh));
  } else {
    all.push_back(planner.estimate(pleat::parse_mesh(request.mesh)));
  }
  const double seconds = static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC / static_cast<double>(all.size());
  sort_estimates(all);
  std::vector<Row> rows;
  for (const auto& made : all) {
    const bool is_shown = static_cast<int>(rows.size()) < request.top;
    rows.push_back({made, is_shown ? advise(request.job, made) : std::vector<pleat::estimate::Advice>{}});
  }
  return {rows, seconds};
}

/// Whether what was asked for holds.
bool run(const Request& request) {
  if (!request.check.empty()) {
    std::ifstream file = open_measured(request.check);
    const Comparison made = compare(read_measured(file, request));
    std::cout << made.table;
    const auto holds = [](double worst, double within) { return within == 0 || worst <= within; };
    return holds(made.worst_percent, request.within) && holds(made.worst_time_percent, request.time_within);
  }
  const auto [rows, seconds] = plan(request);
  if (!request.mesh.empty()) {
    std::cout << detail_text(request.job, rows.front());
  } else {
    const std::span<const Row> all(rows);
    std::cout << draw_text(request.job, all.first(std::min(rows.size(), static_cast<std::size_t>(request.top))));
    const auto fit = std::count_if(rows.begin(), rows.end(), [](const Row& row) {
      return row.made.verdict != pleat::estimate::Verdict::too_large;
    });
    std::cout << '\n' << rows.size() << " meshes can run the job, " << fit << " of them fit\n";
  }
  std::cout << "planned in " << pleat::estimate::detail::fixed(seconds, 4) << " s of processor time a mesh\n";
  write(request.json, to_json(request.job, rows));
  write(request.svg, draw_svg(request.job, rows));
  return true;
}

}  // namespace

int main(int count, char** arguments) {
  try {
    const Request request = read({arguments + 1, arguments + count});
    bool holds = true;
    if (request.help) {
      std::cout << help_text();
    } else {
      holds = run(request);
    }
    if (!std::cout.flush()) throw std::runtime_error("cannot write to the standard output: is its disk full?");
    return holds ? 0 : 1;
  } catch (const pleat::error& error) {
    std::cerr << "mesh_plan: " << error.what() << '\n';
    return 2;
  } catch (const usage_error& error) {
    std::cerr << "mesh_plan: " << error.what() << '\n';
    return 2;
  } catch (const std::exception& error) {
    std::cerr << "mesh_plan: " << error.what() << '\n';
    return 1;
  }
}
