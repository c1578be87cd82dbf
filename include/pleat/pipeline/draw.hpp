// A run of a schedule, simulated or measured, as text and as SVG: one row per rank, time from left to right.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>

#include <pleat/mesh/svg.hpp>
#include <pleat/pipeline/simulate.hpp>

namespace pleat::inline v0::pipeline {

/// How a run is drawn.
struct DrawOptions {
  /// Text: the row is scaled down to this; labels that do not fit are cut.
  int most_columns = 480;
  /// SVG, in pixels.
  int row_width = 1200;
};

namespace detail {

/// With at most two decimals.
inline std::string number_text(double value) {
  const auto hundredths = std::llround(value * 100);
  std::string text = std::to_string(hundredths / 100);
  if (const auto rest = hundredths % 100; rest != 0) {
    text += '.' + std::to_string(rest / 10) + (rest % 10 != 0 ? std::to_string(rest % 10) : "");
  }
  return text;
}
constexpr char backward_letter(OpKind kind) {
  return kind == OpKind::input_backward ? 'b' : kind == OpKind::weight_backward ? 'W' : 'B';
}
inline std::string op_label(const Op& op, const char* joint = "&") {
  const auto label = [](char pass, const Part& part) {
    return pass + std::to_string(part.micro_batch) + (part.chunk == 0 ? "" : "'");
  };
  std::string text;
  if (op.has_forward()) text += label('F', op.forward);
  if (op.kind == OpKind::overlapped) text += joint;
  if (op.kind != OpKind::forward) text += label(backward_letter(op.kind), op.backward);
  return text;
}
inline std::string summary(const Schedule& schedule, const Timeline& run) {
  return std::string(schedule.name) + ": " + std::to_string(schedule.placement.ranks) + " ranks, " +
         std::to_string(schedule.micro_batches) + " micro-batches, makespan " + number_text(run.makespan) +
         ", largest bubble " + number_text(run.max_bubble()) + ", at most " + std::to_string(run.peak_live()) + " live";
}
inline constexpr const char* legend =
    "F forward, B backward, b its input gradient, W its weight gradient; ' the second chunk";

template <class F>
void for_each_span(const Schedule& schedule, const Timeline& run, F&& f) {
  for (std::size_t r = 0; r < run.ranks.size(); ++r) {
    for (std::size_t i = 0; i < run.ranks[r].spans.size(); ++i) {
      f(r, schedule.programs[r].ops[i], run.ranks[r].spans[i]);
    }
  }
}

/// The fill of a pass; the second chunk is darker.
inline std::string pass_fill(char pass, const Part& part) {
  const int hue = pass == 'F' ? 215 : pass == 'W' ? 45 : pass == 'b' ? 165 : 135;
  return v0::detail::text("fill=\"hsl(", hue, ",60%,", part.chunk == 0 ? 82 : 66,
                          "%)\" stroke=\"#ffffff\" stroke-width=\"0.5\"");
}

}  // namespace detail

/// The run as text: a row per rank, an op's label where it begins, dots where the rank waits.
inline std::string draw_text(const Schedule& schedule, const Timeline& run, const DrawOptions& options = {}) {
  double columns_per_unit = 0;
  detail::for_each_span(schedule, run, [&](std::size_t, const Op& op, const Span& span) {
    const auto needed = static_cast<double>(detail::op_label(op).size() + 1);
    if (span.finish > span.start) columns_per_unit = std::max(columns_per_unit, needed / (span.finish - span.start));
  });
  if (run.makespan > 0) columns_per_unit = std::min(columns_per_unit, options.most_columns / run.makespan);
  const auto column = [&](double time) { return static_cast<std::size_t>(std::llround(time * columns_per_unit)); };

  std::vector<std::string> rows(run.ranks.size(), std::string(column(run.makespan), '.'));
  detail::for_each_span(schedule, run, [&](std::size_t r, const Op& op, const Span& span) {
    const std::size_t begin = column(span.start), width = column(span.finish) - begin;
    std::string label = detail::op_label(op).substr(0, width > 1 ? width - 1 : width);
    label.resize(width, ' ');
    rows[r].replace(begin, width, label);
  });
  const std::size_t digits = std::to_string(run.ranks.size() - 1).size();
  std::string all = detail::summary(schedule, run) + '\n';
  for (std::size_t r = 0; r < rows.size(); ++r) {
    const std::string name = std::to_string(r);
    all += std::string(digits - name.size(), ' ') + name + " |" + rows[r] + "|\n";
  }
  return all + detail::legend + '\n';
}

/// The run as an SVG file: blue forward, green backward, teal an input's gradient, yellow a weight's; the second chunk
/// darker; of a pair the forward lies above.
inline std::string draw_svg(const Schedule& schedule, const Timeline& run, const DrawOptions& options = {}) {
  using Style = v0::detail::SvgStyle;
  constexpr int row_height = 34, bar_height = 30, left = Style::margin + 44, top = 70;
  const double scale = run.makespan > 0 ? options.row_width / run.makespan : 0;
  const auto x = [&](double time) { return left + static_cast<int>(std::lround(time * scale)); };
  const auto ranks = static_cast<int>(run.ranks.size());
  v0::detail::SvgWriter svg;
  svg.label(Style::margin, 32, 15, Style::ink, detail::summary(schedule, run), "font-weight=\"700\"");
  svg.label(Style::margin, 53, 11, Style::faint, detail::legend);
  for (int r = 0; r < ranks; ++r) {
    svg.label(Style::margin, top + r * row_height + 20, 11, Style::faint, v0::detail::text("rank ", r));
    svg.rect(left, top + r * row_height, options.row_width, bar_height, 0, "fill=\"#f1f3f6\"");
  }
  detail::for_each_span(schedule, run, [&](std::size_t r, const Op& op, const Span& span) {
    const int at = x(span.start), width = x(span.finish) - at, y = top + static_cast<int>(r) * row_height;
    const int height = op.kind == OpKind::overlapped ? bar_height / 2 : bar_height;
    if (op.has_forward()) svg.rect(at, y, width, height, 0, detail::pass_fill('F', op.forward));
    if (op.kind != OpKind::forward) {
      svg.rect(at, y + bar_height - height, width, height, 0,
               detail::pass_fill(detail::backward_letter(op.kind), op.backward));
    }
    if (width >= 6 * static_cast<int>(detail::op_label(op).size())) {
      svg.label(at + width / 2, y + 19, 10, Style::ink, detail::op_label(op, "&amp;"), "text-anchor=\"middle\"");
    }
  });
  return svg.finish(left + options.row_width + Style::margin, top + ranks * row_height + Style::margin);
}

}  // namespace pleat::inline v0::pipeline
