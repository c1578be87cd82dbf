// Draws when each part of a ring's pass runs, by the cost model, and says what of the transfers is not hidden.
#include <algorithm>
#include <charconv>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <pleat/attention/timeline.hpp>

namespace {

using namespace pleat;

constexpr const char* usage =
    R"(ring_map RANKS TOKENS Q_HEADS KV_HEADS HEAD_DIM [options]     causal, bfloat16, by copies

  --flops X      of forward's kernels, FLOP/s (600e12); backward has 5/6 of it
  --bytes X      of a rank's copies to others, bytes/s (340e9)
  --one-launch   forward in one launch
  --svg FILE     also draw forward and backward
  --help         this text
)";

struct usage_error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// The sizes in their order; with the largest, a drawing takes ten seconds.
struct Size {
  const char* name;
  int most;
};
constexpr Size sizes[] = {
    {"RANKS", 256}, {"TOKENS", 1 << 22}, {"Q_HEADS", 1 << 16}, {"KV_HEADS", 1 << 16}, {"HEAD_DIM", 1 << 16}};
constexpr double most_rate = 1e21;

struct Request {
  std::vector<int> numbers;
  ring::RingRates rates;
  ring::Launches launches = ring::Launches::per_step;
  std::string svg;
  bool help = false;
};

/// A number from 1 to `most`. Errors: usage_error with what was given and what is valid.
template <class Number>
Number number(std::string_view name, std::string_view text, Number most) {
  Number value{};
  const auto [stop, failure] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool is_number = failure == std::errc{} && stop == text.data() + text.size();
  if (!is_number || !(value >= 1 && value <= most)) {
    throw usage_error(message_of(name, " \"", text, "\"; valid: numbers from 1 to ").c_str() +
                      (most == most_rate ? std::string("1e21") : std::to_string(static_cast<int>(most))));
  }
  return value;
}

Request read(const std::vector<std::string_view>& arguments) {
  Request request;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string_view name = arguments[i];
    const auto value = [&] {
      if (i + 1 == arguments.size()) throw usage_error(std::string(name) + " needs a value");
      return arguments[++i];
    };
    const std::size_t given = request.numbers.size();
    if (name == "--help") {
      request.help = true;
      return request;
    }
    if (name == "--one-launch") {
      request.launches = ring::Launches::one;
    } else if (name == "--flops") {
      request.rates.flops = number(name, value(), most_rate);
      request.rates.backward_flops = request.rates.flops * 5 / 6;
    } else if (name == "--bytes") {
      request.rates.bytes_per_second = number(name, value(), most_rate);
    } else if (name == "--svg") {
      request.svg = value();
    } else if (name.substr(0, 2) == "--" || given == std::size(sizes)) {
      throw usage_error("\"" + std::string(name) + "\" is not understood");
    } else {
      request.numbers.push_back(number(sizes[given].name, name, sizes[given].most));
    }
  }
  if (request.numbers.size() != std::size(sizes)) {
    throw usage_error("give RANKS TOKENS Q_HEADS KV_HEADS HEAD_DIM, as in 2 16384 32 32 128");
  }
  return request;
}

double end_of(const std::vector<ring::TimelineSpan>& spans) {
  double end = 0;
  for (const auto& span : spans) end = std::max(end, span.end);
  return end;
}
/// The time of the rank that computes longest, when it never waits.
double computing(const std::vector<ring::TimelineSpan>& spans, int ranks) {
  std::vector<double> sums(static_cast<std::size_t>(ranks));
  for (const auto& span : spans) {
    if (!span.is_transfer) sums[static_cast<std::size_t>(span.rank)] += span.end - span.begin;
  }
  return *std::max_element(sums.begin(), sums.end());
}

/// A row per rank and stream, time to the right.
void draw(std::ofstream& file, const std::vector<ring::TimelineSpan>& spans, const std::string& title, double scale,
          int top) {
  constexpr int left = 120, lane = 24;
  file << "<text x='12' y='" << top << "' font-size='14'>" << title << "</text>\n";
  file << "<text x='1080' y='" << top
       << "' text-anchor='end' fill='#555'>blue: attention to a block; orange: blocks sent; "
       << "brown: sums of gradients sent</text>\n";
  int lanes = 0;
  for (const auto& span : spans) lanes = std::max(lanes, 2 * span.rank + 2);
  for (int row = 0; row < lanes; ++row) {
    file << "<text x='" << left - 8 << "' y='" << top + 24 + row * lane << "' text-anchor='end' fill='#555'>"
         << (row % 2 == 0 ? "rank " + std::to_string(row / 2) + " computes" : "sends") << "</text>\n";
  }
  for (const auto& span : spans) {
    const int row = 2 * span.rank + (span.is_transfer ? 1 : 0), y = top + 8 + row * lane;
    const double x = left + span.begin * scale, width = std::max(0.6, (span.end - span.begin) * scale);
    const bool is_own = span.label == "own" || span.label == "all blocks" || span.label.empty();
    const char* color = !span.is_transfer      ? (is_own ? "#2f5fd0" : "#6f93e6")
                        : span.label[0] == 's' ? "#c2571a"
                                               : "#eeaa5a";
    file << "<rect x='" << x << "' y='" << y << "' width='" << width << "' height='" << lane - 6 << "' fill='" << color
         << "' stroke='white' stroke-width='0.5'/>\n";
    if (width > 7.0 * static_cast<double>(span.label.size())) {
      file << "<text x='" << x + width / 2 << "' y='" << y + 13 << "' text-anchor='middle' fill='white'>" << span.label
           << "</text>\n";
    }
  }
}

void run(const Request& request) {
  const std::vector<int>& n = request.numbers;
  const ring::Plan plan = ring::plan(
      n[0], {.tokens = n[1], .q_heads = n[2], .kv_heads = n[3], .qk_dim = n[4], .v_dim = n[4], .dtype = DType::bf16},
      {.transport = Transport::peer, .launches = request.launches});
  const auto forward = ring::timeline(plan, request.rates, ring::Pass::forward),
             backward = ring::timeline(plan, request.rates, ring::Pass::backward);
  const auto report = [&](const char* pass, const std::vector<ring::TimelineSpan>& spans) {
    const double end = end_of(spans), alone = computing(spans, plan.cp);
    std::printf("%s: %.0f us, %.0f without transfers (%.3f)\n", pass, 1e6 * end, 1e6 * alone, alone / end);
  };
  report("forward", forward);
  report("backward", backward);
  if (request.svg.empty()) return;
  std::ofstream file(request.svg);
  const int height = 60 + 48 * plan.cp, width = 1100;
  const auto title = [&](const char* pass, const std::vector<ring::TimelineSpan>& spans) {
    char words[160];
    std::snprintf(words, sizeof words, "%s, %d tokens on %d ranks, %d/%d heads of %d: %.2f ms", pass, n[1], n[0], n[2],
                  n[3], n[4], 1e3 * end_of(spans));
    return std::string(words);
  };
  file << "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 " << width << ' ' << 2 * height
       << "' font-family='sans-serif' font-size='11'>\n<rect width='100%' height='100%' fill='white'/>\n";
  draw(file, forward, title("Forward", forward), (width - 140) / end_of(forward), 24);
  draw(file, backward, title("Backward", backward), (width - 140) / end_of(backward), height + 24);
  file << "</svg>\n";
  file.close();
  if (!file) throw std::runtime_error("cannot write " + request.svg);
}

}  // namespace

int main(int count, char** arguments) {
  try {
    const Request request = read({arguments + 1, arguments + count});
    if (request.help) {
      std::cout << usage;
    } else {
      run(request);
    }
    if (!std::cout.flush() || std::fflush(stdout) != 0) {
      throw std::runtime_error("cannot write to the standard output: is its disk full?");
    }
    return 0;
  } catch (const usage_error& e) {
    std::cerr << "ring_map: " << e.what() << "\n\n" << usage;
    return 2;
  } catch (const pleat::error& e) {
    std::cerr << "ring_map: " << e.what() << '\n';
    return 2;
  } catch (const std::exception& e) {
    std::cerr << "ring_map: " << e.what() << '\n';
    return 1;
  }
}
