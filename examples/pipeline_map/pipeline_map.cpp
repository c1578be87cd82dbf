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

/// Reads one number from the front of `text`.
template <class Number>
Number take_number(std::string_view& text) {
  Number value{};
  const auto [stop, failure] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (failure != std::errc{}) throw usage_error("\"" + std::string(text) + "\" is not the number that is needed");
  text.remove_prefix(static_cast<std::size_t>(stop - text.data()));
  return value;
}
template <class Number>
Number number(std::string_view text) {
  const Number value = take_number<Number>(text);
  if (!text.empty()) throw usage_error("\"" + std::string(text) + "\" follows a number");
  return value;
}
pleat::pipeline::Costs read_costs(std::string_view text) {
  pleat::pipeline::Costs costs;
  for (double* cost : {&costs.forward, &costs.input_backward, &costs.weight_backward, &costs.overlapped}) {
    *cost = take_number<double>(text);
    const bool is_last = cost == &costs.overlapped;
    if (text.substr(0, 1) != (is_last ? "" : ",")) throw usage_error("--costs needs four numbers, as in 1,1,1,2.5");
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
      request.draw.most_columns = number<int>(value());
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
  return measured(schedule, std::move(spans));
}

void run(const Request& request) {
  using namespace pleat::pipeline;
  const Schedule schedule =
      make_schedule(parse_kind(request.words[0]), number<int>(request.words[1]), number<int>(request.words[2]));
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
    std::cerr << error.what() << "\n\n" << usage;
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
  }
  return 2;
}
