// Draws when each part of a ring's pass runs, by the cost model, and says what of the transfers is not hidden.
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <stdexcept>
#include <string>
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
)";

struct Request {
  std::vector<int> numbers;
  ring::RingRates rates;
  ring::Launches launches = ring::Launches::per_step;
  std::string svg;
};
Request read(int argc, char** argv) {
  Request request;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const bool has_value = i + 1 < argc;
    if (name == "--one-launch") {
      request.launches = ring::Launches::one;
    } else if (name == "--flops" && has_value) {
      request.rates.flops = std::stod(argv[++i]);
      request.rates.backward_flops = request.rates.flops * 5 / 6;
    } else if (name == "--bytes" && has_value) {
      request.rates.bytes_per_second = std::stod(argv[++i]);
    } else if (name == "--svg" && has_value) {
      request.svg = argv[++i];
    } else {
      request.numbers.push_back(std::stoi(name));
    }
  }
  if (request.numbers.size() != 5) throw std::runtime_error(usage);
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

int run(const Request& request) {
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
  if (request.svg.empty()) return 0;
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
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(read(argc, argv));
  } catch (const std::exception& e) {
    std::cerr << e.what() << '\n';
    return 2;
  }
}
