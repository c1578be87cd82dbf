// A mesh as a picture: the ranks of each stage as cells, once per view, with groups outlined and nodes shaded.
#pragma once

#include <algorithm>
#include <string>

#include <pleat/mesh/text.hpp>
#include <pleat/mesh/view_grid.hpp>

namespace pleat::inline v0 {

namespace detail {

/// Sizes and colors of the picture, in SVG user units (pixels).
struct SvgStyle {
  static constexpr int cell_width = 38;
  static constexpr int cell_height = 26;
  static constexpr int gap = 6;       ///< between cells of a row
  static constexpr int row_gap = 16;  ///< between rows; outlines and node shading run in it
  static constexpr int margin = 28;
  static constexpr int panel_padding = 18;
  static constexpr int panel_header = 62;
  static constexpr int row_label = 72;
  static constexpr int node_label = 76;
  static constexpr int narrowest_panel = 290;

  static constexpr const char* ink = "#1f2733";
  static constexpr const char* faint = "#6b7686";
  static constexpr const char* attention = "#2f5fd0";
  static constexpr const char* expert = "#c2571a";
  static constexpr const char* node_shades[2] = {"#edf0f4", "#d3dae4"};
};

/// Elements of an SVG file, one after the other.
class SvgWriter {
 public:
  template <class... Parts>
  SvgWriter& add(const Parts&... parts) {
    body_ += text(parts...);
    return *this;
  }
  void rect(int x, int y, int width, int height, int radius, const std::string& look) {
    add("<rect x=\"", x, "\" y=\"", y, "\" width=\"", width, "\" height=\"", height, "\" rx=\"", radius, "\" ", look,
        "/>\n");
  }
  void label(int x, int y, int size, const char* color, const std::string& words, const char* look = "") {
    add("<text x=\"", x, "\" y=\"", y, "\" font-size=\"", size, "\" fill=\"", color, "\" ", look, ">", words,
        "</text>\n");
  }
  std::string finish(int width, int height) const {
    return text("<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"", width, "\" height=\"", height,
                "\" viewBox=\"0 0 ", width, " ", height,
                "\" font-family=\"Inter, 'Segoe UI', Helvetica, Arial, sans-serif\">\n",
                "<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n") +
           body_ + "</svg>\n";
  }

 private:
  std::string body_;
};

/// One color per cp group of a stage, neighbours far apart on the wheel.
inline std::string group_fill(int group) {
  return text("fill=\"hsl(", (215 + group % 360 * 137) % 360, ",", 62 - group / 8 % 2 * 20, "%,",
              84 - group / 16 % 2 * 10, "%)\"");
}

/// One view of one stage as a panel.
template <folded_mesh Mesh>
class SvgPanel {
 public:
  SvgPanel(const ViewGrid<Mesh>& grid, int gpus_per_domain) : grid_(grid), gpus_per_domain_(gpus_per_domain) {}

  int width() const {
    return std::max(Style::narrowest_panel,
                    2 * Style::panel_padding + Style::row_label + cells_width() + Style::node_label);
  }
  int height() const {
    return Style::panel_header + grid_.shown_rows() * (Style::cell_height + Style::row_gap) + Style::panel_padding +
           (is_cut() ? 18 : 0);
  }

  void draw(SvgWriter& svg, int x, int y, int height, int stage) const {
    const bool attention = grid_.view == View::attention;
    const char* accent = attention ? Style::attention : Style::expert;
    svg.rect(x, y, width(), height, 12, "fill=\"#fafbfc\" stroke=\"#dfe4ea\"");
    svg.label(x + Style::panel_padding, y + 26, 14, accent, attention ? "attention view" : "expert view",
              "font-weight=\"700\"");
    svg.label(x + width() - Style::panel_padding, y + 26, 13, Style::ink,
              text(grid_.outer(), " ", grid_.rows(), " × ", grid_.inner(), " ", grid_.columns()),
              "text-anchor=\"end\"");

    const int left = x + Style::panel_padding + Style::row_label;
    const int top = y + Style::panel_header;
    svg.label(x + Style::panel_padding, top - 14, 11, Style::faint, text(grid_.outer(), " ↓"));
    svg.label(left + cells_width() + 6, top - 14, 11, Style::faint, text(grid_.inner(), " →"));
    for (int column = 0; column < grid_.shown_columns(); ++column) {
      svg.label(left + column * (Style::cell_width + Style::gap) + Style::cell_width / 2, top - 14, 11, Style::faint,
                text(column), "text-anchor=\"middle\"");
    }
    for (int row = 0; row < grid_.shown_rows(); ++row) shade_nodes(svg, left, row_top(top, row), stage, row);
    for (int row = 0; row < grid_.shown_rows(); ++row) draw_row(svg, left, row_top(top, row), stage, row, accent);
    if (is_cut()) {
      svg.label(left, row_top(top, grid_.shown_rows()) + 12, 11, Style::faint,
                text("cut: ", grid_.rows(), " rows of ", grid_.columns(), " ranks in all"));
    }
  }

 private:
  using Style = SvgStyle;

  bool is_cut() const { return grid_.shown_rows() < grid_.rows() || grid_.shown_columns() < grid_.columns(); }
  int cells_width() const { return grid_.shown_columns() * (Style::cell_width + Style::gap); }
  static int row_top(int top, int row) { return top + row * (Style::cell_height + Style::row_gap); }
  int node(int stage, int row, int column) const { return grid_.rank(stage, row, column) / gpus_per_domain_; }

  /// A band behind each run of cells of one node; bands of neighbouring rows touch, and the last of a row has the name.
  void shade_nodes(SvgWriter& svg, int left, int top, int stage, int row) const {
    const int columns = grid_.shown_columns();
    for (int first = 0, next = 0; first < columns; first = next) {
      while (next < columns && node(stage, row, next) == node(stage, row, first)) ++next;
      const int from = first == 0 ? left - 10 : left - Style::gap / 2 + first * (Style::cell_width + Style::gap);
      const int to = next == columns ? left + cells_width() + Style::node_label - Style::gap
                                     : left - Style::gap / 2 + next * (Style::cell_width + Style::gap);
      svg.rect(from, top - Style::row_gap / 2, to - from, Style::cell_height + Style::row_gap, 0,
               text("fill=\"", Style::node_shades[node(stage, row, first) % 2], "\""));
    }
    const int first = node(stage, row, 0);
    const int last = node(stage, row, columns - 1);
    if (row == 0 || node(stage, row - 1, columns - 1) != last) {
      svg.label(left + cells_width() + 6, top + 17, 11, Style::faint,
                first == last ? text("node ", last) : text("nodes ", first, "–", last));
    }
  }

  void draw_row(SvgWriter& svg, int left, int top, int stage, int row, const char* accent) const {
    svg.label(left - 18, top + 17, 11, Style::faint, text(row), "text-anchor=\"end\"");
    svg.rect(left - 4, top - 4, cells_width() - Style::gap + 8, Style::cell_height + 8, 9,
             text("fill=\"none\" stroke=\"", accent, "\" stroke-width=\"1.6\""));
    for (int column = 0; column < grid_.shown_columns(); ++column) {
      const int rank = grid_.rank(stage, row, column);
      const int x = left + column * (Style::cell_width + Style::gap);
      svg.rect(x, top, Style::cell_width, Style::cell_height, 5, group_fill(coordinate(grid_.mesh, rank).dp));
      const bool replicated = grid_.mesh.replicas > 1;
      svg.label(x + Style::cell_width / 2 - (replicated ? 5 : 0), top + 18, 13, Style::ink, text(rank),
                "text-anchor=\"middle\" font-weight=\"600\"");
      if (replicated) {
        svg.label(x + Style::cell_width - 3, top + 10, 8, Style::ink,
                  text("r", replica_group_shape(grid_.mesh).index(rank)), "text-anchor=\"end\"");
      }
    }
  }

  ViewGrid<Mesh> grid_;
  int gpus_per_domain_;
};

/// What the marks mean, and which groups stay inside a node. Returns the height it took.
template <folded_mesh Mesh>
int draw_legend(SvgWriter& svg, const Mesh& mesh, int x, int y, int width, const DrawOptions& options) {
  using Style = SvgStyle;
  const auto mark = [&](int column, const std::string& look, const std::string& words) {
    svg.rect(x + column, y, 26, 16, 5, look);
    svg.label(x + column + 34, y + 13, 12, Style::ink, words);
  };
  const auto outline = [](const char* color) {
    return text("fill=\"none\" stroke=\"", color, "\" stroke-width=\"1.6\"");
  };
  mark(0, outline(Style::attention), "cp group (a column: dp group)");
  mark(230, outline(Style::expert), "ep group (a column: expert_dp group)");
  y += 28;
  mark(0, group_fill(0), "same color: same cp group");
  mark(230, text("fill=\"", Style::node_shades[1], "\""), text("shade: node of ", options.gpus_per_domain, " ranks"));
  y += 28;
  if (mesh.replicas > 1) {
    svg.label(x, y + 13, 12, Style::ink, "r0, r1 ..: the replica that the rank's shards belong to");
    y += 28;
  }

  int column = 0;
  for (const DomainNote& note : domain_notes(mesh, options.gpus_per_domain)) {
    const bool fits = note.spanned == 1;
    const std::string words =
        text(note.groups, " of ", note.size, fits ? ": inside a node" : text(": up to ", note.spanned, " nodes"));
    const int pill = static_cast<int>(words.size()) * 6 + 24;
    if (column > 0 && column + pill > width) {
      column = 0;
      y += 30;
    }
    svg.rect(x + column, y, pill, 22, 11, fits ? "fill=\"#dff3e4\"" : "fill=\"#fdeadb\"");
    svg.label(x + column + pill / 2, y + 15, 11, fits ? "#1d6b36" : "#96480f", words, "text-anchor=\"middle\"");
    column += pill + 8;
  }
  return y + 22;
}

}  // namespace detail

/// Both views of a mesh as an SVG file. Cells of one color are one cp group in both panels, so that the expert panel
/// shows how an ep group lies across cp groups. Large meshes are cut. Errors: M00.
template <folded_mesh Mesh>
std::string draw_svg(const Mesh& mesh, const DrawOptions& options = {}) {
  using Style = detail::SvgStyle;
  detail::require_at_least_1("gpus_per_domain", options.gpus_per_domain);
  const detail::SvgPanel<Mesh> attention({mesh, View::attention, 32}, options.gpus_per_domain);
  const detail::SvgPanel<Mesh> expert({mesh, View::expert, 32}, options.gpus_per_domain);
  const bool stacked = attention.width() + expert.width() > 1400;
  const int step = 20;

  const int content = stacked ? std::max(attention.width(), expert.width()) : attention.width() + step + expert.width();
  detail::SvgWriter svg;
  int y = Style::margin + 22;
  svg.label(Style::margin, y, 24, Style::ink, to_string(mesh), "font-weight=\"700\"");
  svg.label(Style::margin, y += 24, 13, Style::faint, detail::summary(mesh));
  for (int stage = 0; stage < detail::shown_stages(mesh); ++stage) {
    svg.label(Style::margin, y += 32, 13, Style::ink, detail::text("stage pp = ", stage), "font-weight=\"600\"");
    y += 12;
    const int row_height = std::max(attention.height(), expert.height());
    attention.draw(svg, Style::margin, y, stacked ? attention.height() : row_height, stage);
    if (stacked) {
      expert.draw(svg, Style::margin, y += attention.height() + step, expert.height(), stage);
      y += expert.height();
    } else {
      expert.draw(svg, Style::margin + attention.width() + step, y, row_height, stage);
      y += row_height;
    }
  }
  if (const std::string note = detail::hidden_stages_note(mesh); !note.empty()) {
    svg.label(Style::margin, y += 26, 13, Style::faint, note);
  }
  y = detail::draw_legend(svg, mesh, Style::margin, y + 26, content, options);
  return svg.finish(content + 2 * Style::margin, y + Style::margin);
}

}  // namespace pleat::inline v0
