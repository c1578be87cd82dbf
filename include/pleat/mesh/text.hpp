// A mesh as text: the short form `pp2-dp4-cp4-ep2` both ways, and a drawing of its two views in letters.
#pragma once

#include <algorithm>
#include <charconv>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include <pleat/mesh/runtime_mesh.hpp>
#include <pleat/mesh/view_grid.hpp>

namespace pleat::inline v0 {

/// The mesh as text, `pp2-dp4-cp4-ep2`, and `-r2` behind it for two replicas.
template <folded_mesh Mesh>
std::string to_string(const Mesh& mesh) {
  return detail::text(mesh);
}

/// The mesh that a text like `pp2-dp4-cp4-ep2-r2` names; parts in any order, those left out are 1.
/// Errors: M09 when it is no such text, M00, M02 and M03 when it is no legal mesh.
inline RuntimeMesh parse_mesh(std::string_view mesh_text) {
  const auto refuse = [&](std::string_view part, const char* why) {
    fail<mesh_error>("pleat[M09]: \"", mesh_text, "\" is not a mesh: \"", part, "\" ", why,
                     "; valid: pp, dp, cp, ep and r, each at most once, as in pp2-dp4-cp4-ep2 or pp1-dp4-cp4-ep4-r2");
  };
  struct Part {
    std::string_view name;
    int* degree;
    bool given;
  };
  MeshDegrees degrees;
  Part parts[] = {{"pp", &degrees.pp, false},
                  {"dp", &degrees.dp, false},
                  {"cp", &degrees.cp, false},
                  {"ep", &degrees.ep, false},
                  {"r", &degrees.replicas, false}};

  for (std::string_view rest = mesh_text;;) {
    const std::size_t dash = rest.find('-');
    const std::string_view part = rest.substr(0, dash);
    const std::size_t digits = std::min(part.find_first_of("0123456789"), part.size());
    const auto known = std::find_if(std::begin(parts), std::end(parts),
                                    [&](const Part& p) { return p.name == part.substr(0, digits); });
    if (known == std::end(parts)) refuse(part, "is no part of one");
    if (known->given) refuse(part, "is given twice");
    known->given = true;
    const char* const end = part.data() + part.size();
    const auto [stop, failure] = std::from_chars(part.data() + digits, end, *known->degree);
    if (failure == std::errc::invalid_argument) refuse(part, "needs a number");
    if (failure != std::errc{}) refuse(part, "has a number that does not fit in int");
    if (stop != end) refuse(part, "has more behind its number, and parts are joined by \"-\"");
    if (dash == std::string_view::npos) return RuntimeMesh(degrees);
    rest.remove_prefix(dash + 1);
  }
}

namespace detail {

inline std::string padded(const std::string& text, int width) {
  const int missing = width - static_cast<int>(text.size());
  return missing > 0 ? std::string(static_cast<std::size_t>(missing), ' ') + text : text;
}
inline std::string filled(std::string text, std::size_t width) {
  if (text.size() < width) text.resize(width, ' ');
  return text;
}
/// a, b .. z, aa, ab ..
inline std::string letters(int number) {
  std::string text;
  for (++number; number > 0; number = (number - 1) / 26) {
    text.insert(text.begin(), static_cast<char>('a' + (number - 1) % 26));
  }
  return text;
}

/// One view of one stage, line by line; `|` stands before the first rank of a node.
template <folded_mesh Mesh>
std::vector<std::string> draw_view(const ViewGrid<Mesh>& grid, int stage, const DrawOptions& options) {
  const int width = static_cast<int>(text(grid.mesh.world_size - 1).size());
  const std::string outer = text(grid.outer());
  const int label = static_cast<int>(outer.size() + 1 + text(grid.rows() - 1).size());
  const auto cut = [](bool is_cut) { return is_cut ? "  .." : ""; };

  std::vector<std::string> lines;
  lines.push_back(text(grid.view == View::attention ? "attention view: " : "expert view: ", outer, ' ', grid.rows(),
                       " x ", grid.inner(), ' ', grid.columns()));
  std::string header = padded(text(grid.inner()), label) + ' ';
  for (int column = 0; column < grid.shown_columns(); ++column) header += "  " + padded(text(column), width);
  lines.push_back(header + cut(grid.shown_columns() < grid.columns()));
  for (int row = 0; row < grid.shown_rows(); ++row) {
    std::string line = padded(text(row == 0 ? outer : std::string(), ' ', row), label) + ' ';
    for (int column = 0; column < grid.shown_columns(); ++column) {
      const int rank = grid.rank(stage, row, column);
      line += (rank % options.gpus_per_domain == 0 ? " |" : "  ") + padded(text(rank), width);
    }
    lines.push_back(line + cut(grid.shown_columns() < grid.columns()));
  }
  if (grid.shown_rows() < grid.rows()) lines.push_back(padded("..", label));
  return lines;
}

inline std::string beside(const std::vector<std::string>& left, const std::vector<std::string>& right) {
  std::size_t left_width = 0;
  std::size_t right_width = 0;
  for (const std::string& line : left) left_width = std::max(left_width, line.size());
  for (const std::string& line : right) right_width = std::max(right_width, line.size());
  const bool stacked = left_width + right_width > 110;

  std::string all;
  for (std::size_t i = 0; i < std::max(left.size(), stacked ? 0 : right.size()); ++i) {
    std::string line = i < left.size() ? left[i] : std::string();
    if (!stacked && i < right.size()) line = filled(line, left_width + 6) + right[i];
    all += "  " + line + '\n';
  }
  if (stacked) {
    all += '\n';
    for (const std::string& line : right) all += "  " + line + '\n';
  }
  return all;
}

/// The ranks of the first stage in one line, and under each the letters of its groups.
template <folded_mesh Mesh>
std::string draw_letters(const Mesh& mesh) {
  constexpr int ranks_per_line = 16;
  const int shown = std::min(int{mesh.stage_size}, 4 * ranks_per_line);
  const int width = static_cast<int>(text(shown - 1).size()) + 1;
  std::string all;
  for (int first = 0; first < shown; first += ranks_per_line) {
    const int last = std::min(first + ranks_per_line, shown);
    const auto line = [&](const char* name, auto&& cell) {
      all += "  " + filled(name, 10);
      for (int rank = first; rank < last; ++rank) all += ' ' + padded(cell(rank), width);
      all += '\n';
    };
    line("rank", [](int rank) { return text(rank); });
    for (const Axis axis : {Axis::cp, Axis::dp, Axis::ep, Axis::expert_dp}) {
      const GroupShape shape = group_shape(mesh, axis);
      line(name_of(axis), [&](int rank) { return letters(shape.number(rank)); });
    }
    if (mesh.replicas > 1) {
      const GroupShape shape = replica_group_shape(mesh);
      line("replica", [&](int rank) { return text(shape.index(rank)); });
    }
    if (last < shown) all += '\n';
  }
  return all;
}

}  // namespace detail

/// Both views of a mesh for a terminal: the ranks of each stage as two grids, the groups of a rank as letters (equal
/// letters in a line are one group), and how the groups lie in nodes. Large meshes are cut.
template <folded_mesh Mesh>
std::string draw_text(const Mesh& mesh, const DrawOptions& options = {}) {
  detail::require_at_least_1("gpus_per_domain", options.gpus_per_domain);
  const detail::ViewGrid<Mesh> attention{mesh, View::attention, 16};
  const detail::ViewGrid<Mesh> expert{mesh, View::expert, 16};

  std::string all = to_string(mesh) + ": " + detail::summary(mesh) + '\n';
  all += detail::text("rows are cp and ep groups, columns dp and expert_dp groups; | starts a node of ",
                      options.gpus_per_domain, '\n');
  for (int stage = 0; stage < detail::shown_stages(mesh); ++stage) {
    all += detail::text("\nstage pp=", stage, '\n');
    all += detail::beside(detail::draw_view(attention, stage, options), detail::draw_view(expert, stage, options));
  }
  if (const std::string note = detail::hidden_stages_note(mesh); !note.empty()) all += '\n' + note + '\n';

  all += "\ngroups of stage pp=0: the same letter in a line is the same group\n" + detail::draw_letters(mesh);
  all += detail::text("\nnodes of ", options.gpus_per_domain, '\n');
  for (const detail::DomainNote& note : detail::domain_notes(mesh, options.gpus_per_domain)) {
    all += "  " + detail::filled(note.groups, 10) + detail::text(" groups of ", note.size, ": ");
    all += note.spanned == 1 ? "inside one node\n" : detail::text("up to ", note.spanned, " nodes\n");
  }
  return all;
}

}  // namespace pleat::inline v0
