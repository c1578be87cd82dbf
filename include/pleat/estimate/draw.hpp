// Estimates as a picture: a bar of memory per mesh against the GPU's size, and beside it the time of a step.
#pragma once

#include <pleat/estimate/report.hpp>
#include <pleat/mesh/svg.hpp>

namespace pleat::inline v0::estimate {

namespace detail {

struct PlanStyle {
  static constexpr int margin = 28;
  static constexpr int row = 24;
  static constexpr int bar = 16;
  static constexpr int names = 196;
  static constexpr int memory_width = 620;
  static constexpr int step_width = 190;
  static constexpr int gap = 118;  ///< between the two charts: totals
  static constexpr int most_rows = 32;

  /// What stays, in blues; what comes and goes with units, in greens; with tokens, in warm tones; the rest in greys.
  static constexpr const char* fills[part_count] = {"#1f4e9c", "#3f78c9", "#86aee6", "#2f8f6b", "#7cc7a5", "#e08a2e",
                                                    "#f2c078", "#c9526b", "#e39aa9", "#8a7fb8", "#aab2bd"};
  static const char* pill(Verdict v) {
    return v == Verdict::fits ? "#dff3e4" : v == Verdict::tight ? "#fdf0cf" : "#fbdfdc";
  }
  static const char* words(Verdict v) {
    return v == Verdict::fits ? "#1d6b36" : v == Verdict::tight ? "#7a5a00" : "#9c2a1f";
  }
};

/// A round step of an axis that gives some six ticks up to `most`.
inline double tick_step(double most) {
  double step = 1e-9;
  while (most / step > 60) step *= 10;
  for (const double factor : {1.0, 2.0, 5.0, 10.0}) {
    if (most / (step * factor) <= 8) return step * factor;
  }
  return step * 10;
}
inline std::string tick_text(double value) {
  std::string text = fixed(value, value >= 10 || value == 0 ? 0 : 3);
  while (text.find('.') != std::string::npos && (text.back() == '0' || text.back() == '.')) text.pop_back();
  return text;
}

}  // namespace detail

/// The first meshes of a sorted list as an SVG file.
inline std::string draw_svg(const Job& job, std::span<const Row> rows) {
  using Style = detail::PlanStyle;
  using Ink = v0::detail::SvgStyle;
  using v0::detail::text;
  const std::span<const Row> shown = rows.first(std::min<std::size_t>(rows.size(), Style::most_rows));
  double most_bytes = 1.1 * static_cast<double>(job.gpu_bytes), most_seconds = 1e-9;
  for (const Row& row : shown) {
    most_bytes = std::max(most_bytes, row.made.memory.total());
    most_seconds = std::max(most_seconds, row.made.time.seconds.expected);
  }
  // A bar past twice the GPU's size says no more than that it is too long.
  most_bytes = std::min(most_bytes, 2.2 * static_cast<double>(job.gpu_bytes));
  const int left = Style::margin + Style::names, steps = left + Style::memory_width + Style::gap;
  const int width = steps + Style::step_width + 96 + Style::margin, top = Style::margin + 122;
  const auto x_of = [&](double bytes) {
    return left + static_cast<int>(std::lround(std::min(bytes, most_bytes) / most_bytes * Style::memory_width));
  };
  const int bottom = top + static_cast<int>(shown.size()) * Style::row;

  v0::detail::SvgWriter svg;
  svg.label(Style::margin, Style::margin + 20, 22, Ink::ink,
            text(job.model.name.c_str(), " on ", job.world, job.world == 1 ? " GPU" : " GPUs", " of ",
                 detail::fixed(detail::gib(static_cast<double>(job.gpu_bytes)), 0).c_str(), " GiB"),
            "font-weight=\"700\"");
  const std::string all = job_text(job);
  const std::size_t cut = all.find("to a domain; ");
  svg.label(Style::margin, Style::margin + 42, 12, Ink::faint,
            all.substr(all.find(": ") + 2, cut + 11 - all.find(": ") - 2));
  svg.label(Style::margin, Style::margin + 59, 12, Ink::faint, all.substr(cut + 13));
  svg.label(left, top - 26, 12, Ink::ink, "memory of the rank that takes most, GiB", "font-weight=\"600\"");
  svg.label(steps, top - 26, 12, Ink::ink, "a step is expected to take, s; dark: at least", "font-weight=\"600\"");

  const auto axis = [&](double most, double unit, auto place) {
    const double step = detail::tick_step(most / unit);
    for (double at = 0; at <= most / unit * 1.0001; at += step) {
      const int x = place(at * unit);
      svg.rect(x, top - 4, 1, bottom - top + 6, 0, "fill=\"#e6eaef\"");
      svg.label(x, top - 8, 10, Ink::faint, detail::tick_text(at), "text-anchor=\"middle\"");
    }
  };
  axis(most_bytes, 1 << 30, x_of);
  const auto step_x = [&](double s) {
    return steps + static_cast<int>(std::lround(s / most_seconds * Style::step_width));
  };
  axis(most_seconds, 1, step_x);
  const auto size = static_cast<double>(job.gpu_bytes);
  svg.rect(x_of(tight_share * size), top - 4, x_of(size) - x_of(tight_share * size), bottom - top + 6, 0,
           "fill=\"#fdf0cf\"");

  int y = top;
  for (const Row& row : shown) {
    const Estimate& e = row.made;
    svg.label(left - 10, y + 14, 12, Ink::ink, to_string(e.mesh), "text-anchor=\"end\" font-family=\"monospace\"");
    double from = 0;
    for (int i = 0; i < part_count; ++i) {
      const double to = from + e.memory.bytes[static_cast<std::size_t>(i)];
      if (x_of(to) > x_of(from)) {
        svg.rect(x_of(from), y + 2, x_of(to) - x_of(from), Style::bar, 0, text("fill=\"", Style::fills[i], "\""));
      }
      from = to;
    }
    svg.label(left + Style::memory_width + 46, y + 14, 11, Ink::ink, detail::fixed(detail::gib(from), 1),
              "text-anchor=\"end\"");
    svg.rect(left + Style::memory_width + 52, y + 2, 52, Style::bar, 8, text("fill=\"", Style::pill(e.verdict), "\""));
    svg.label(left + Style::memory_width + 78, y + 14, 10, Style::words(e.verdict),
              e.verdict == Verdict::too_large ? "too large" : name_of(e.verdict), "text-anchor=\"middle\"");
    svg.rect(steps, y + 2, std::max(1, step_x(e.time.seconds.expected) - steps), Style::bar, 0, "fill=\"#c3cbd6\"");
    svg.rect(step_x(e.time.seconds.bound) - 1, y + 2, 2, Style::bar, 0, "fill=\"#5b6675\"");
    svg.label(step_x(e.time.seconds.expected) + 5, y + 14, 10, Ink::faint,
              text(detail::seconds(e.time.seconds.expected).c_str(), " ", name_of(e.time.limit)));
    y += Style::row;
  }
  svg.rect(x_of(size), top - 4, 2, bottom - top + 6, 0, "fill=\"#9c2a1f\"");

  int column = Style::margin;
  y += 20;
  for (int i = 0; i < part_count; ++i) {
    const char* const name = name_of(static_cast<Part>(i));
    const int taken = 34 + 7 * static_cast<int>(std::string_view(name).size());
    if (column + taken > width - Style::margin) {
      column = Style::margin;
      y += 22;
    }
    svg.rect(column, y, 14, 14, 3, text("fill=\"", Style::fills[i], "\""));
    svg.label(column + 20, y + 11, 12, Ink::ink, name);
    column += taken;
  }
  y += 34;
  svg.label(Style::margin, y, 11, Ink::faint,
            text("red: the GPU's memory; above 95 % of it a mesh is tight. ",
                 shown.size() < rows.size() ? "The first " : "", shown.size(),
                 shown.size() < rows.size() ? text(" of ", rows.size()).c_str() : "", " meshes that can run the job."));
  return svg.finish(width, y + Style::margin);
}

}  // namespace pleat::inline v0::estimate
