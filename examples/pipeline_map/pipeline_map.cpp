// Draws a pipeline schedule: as simulated with given costs, or from times that were measured.
#include <charconv>
#include <fstream>
#include <iostream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <pleat/pipeline.hpp>

namespace {

constexpr const char* usage =
    R"(pipeline_map SCHEDULE RANKS MICRO_BATCHES [options]     SCHEDULE: 1f1b, 1f1b-pairs, zb-v or dualpipev

  --costs F,B,W,FB   times of forward, input gradient, weight gradient and overlapped pair (1,1,1,3)
  --times FILE       a measured run: "start finish" of each op, rank after rank, in place of the costs
  --columns N        the widest row of the text (480)
  --svg FILE         also write a picture
  --help             this text
)";

struct usage_error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Request {
  std::vector<std::string_view> words;
  pleat::pipeline::Costs costs;
  pleat::pipeline::DrawOptions draw;
  std::string times;
  std::string svg;
  bool help = false;
};

// With the largest of these, a drawing takes half a minute.
constexpr int most_ranks = 128, most_micro_batches = 1024, most_columns = 1 << 16;
constexpr double most_cost = 1e6, longest_run = 1e15;

/// A number from 1 to `most`. Errors: usage_error with what was given and what is valid.
int number(std::string_view name, std::string_view text, int most) {
  int value = 0;
  const auto [stop, failure] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool is_number = failure == std::errc{} && stop == text.data() + text.size();
  if (!is_number || value < 1 || value > most) {
    throw usage_error(std::string(name) + " \"" + std::string(text) + "\"; valid: 1 to " + std::to_string(most));
  }
  return value;
}
pleat::pipeline::Costs read_costs(const std::string_view given) {
  const auto refuse = [&] {
    throw usage_error("--costs \"" + std::string(given) + "\"; valid: four numbers from 0 to " +
                      std::to_string(static_cast<int>(most_cost)) + ", as in 1,1,1,2.5");
  };
  pleat::pipeline::Costs costs;
  std::string_view text = given;
  for (double* cost : {&costs.forward, &costs.input_backward, &costs.weight_backward, &costs.overlapped}) {
    const auto [stop, failure] = std::from_chars(text.data(), text.data() + text.size(), *cost);
    if (failure != std::errc{} || !(*cost >= 0 && *cost <= most_cost)) refuse();
    text.remove_prefix(static_cast<std::size_t>(stop - text.data()));
    const bool is_last = cost == &costs.overlapped;
    if (text.substr(0, 1) != (is_last ? "" : ",")) refuse();
    if (!is_last) text.remove_prefix(1);
  }
  return costs;
}

Request read(const std::vector<std::string_view>& arguments) {
  Request request;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string_view name = arguments[i];
    const auto value = [&] {
      if (i + 1 == arguments.size()) throw usage_error(std::string(name) + " needs a value");
      return arguments[++i];
    };
    if (name == "--help") {
      request.help = true;
    } else if (name == "--costs") {
      request.costs = read_costs(value());
    } else if (name == "--times") {
      request.times = value();
    } else if (name == "--columns") {
      request.draw.most_columns = number(name, value(), most_columns);
    } else if (name == "--svg") {
      request.svg = value();
    } else if (name.substr(0, 1) == "-") {
      throw usage_error("\"" + std::string(name) + "\" is not understood");
    } else {
      request.words.push_back(name);
    }
  }
  if (!request.help && request.words.size() != 3) throw usage_error("give a schedule, ranks and micro-batches");
  return request;
}

pleat::pipeline::Timeline read_times(const pleat::pipeline::Schedule& schedule, const std::string& name) {
  std::ifstream file(name);
  if (!file) throw std::runtime_error("cannot read " + name);
  std::vector<std::vector<pleat::pipeline::Span>> spans;
  for (const pleat::pipeline::Program& program : schedule.programs) {
    std::vector<pleat::pipeline::Span>& rank = spans.emplace_back();
    for (pleat::pipeline::Span span; rank.size() < program.ops.size() && file >> span.start >> span.finish;) {
      rank.push_back(span);
    }
  }
  pleat::pipeline::Timeline run = measured(schedule, std::move(spans));
  if (!(run.makespan <= longest_run))
    throw usage_error("--times " + name + ": a run is longer than 1e15; valid: up to it");
  return run;
}

void run(const Request& request) {
  using namespace pleat::pipeline;
  const int ranks = number("RANKS", request.words[1], most_ranks);
  const int micro_batches = number("MICRO_BATCHES", request.words[2], most_micro_batches);
  const Schedule schedule = make_schedule(parse_kind(request.words[0]), ranks, micro_batches);
  const Timeline timeline =
      request.times.empty() ? simulate(schedule, request.costs) : read_times(schedule, request.times);
  std::cout << draw_text(schedule, timeline, request.draw);
  if (request.svg.empty()) return;
  std::ofstream file(request.svg);
  file << draw_svg(schedule, timeline, request.draw);
  if (!file.flush()) throw std::runtime_error("cannot write " + request.svg);
  std::cout << "wrote " << request.svg << '\n';
}

}  // namespace

int main(int count, char** arguments) {
  try {
    const Request request = read({arguments + 1, arguments + count});
    request.help ? void(std::cout << usage) : run(request);
    if (!std::cout.flush()) throw std::runtime_error("cannot write to the standard output: is its disk full?");
    return 0;
  } catch (const usage_error& error) {
    std::cerr << "pipeline_map: " << error.what() << "\n\n" << usage;
  } catch (const std::exception& error) {
    std::cerr << "pipeline_map: " << error.what() << '\n';
  }
  return 2;
}
