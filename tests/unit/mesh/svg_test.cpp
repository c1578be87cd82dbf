#include <doctest/doctest.h>

#include <pleat/mesh/svg.hpp>
#include <string>

using pleat::parse_mesh;

namespace {
std::size_t count(const std::string& text, const std::string& part) {
  std::size_t found = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + part.size())) ++found;
  return found;
}
}  // namespace

TEST_CASE("a picture has every rank once per view, and well-formed elements") {
  const std::string svg = pleat::draw_svg(parse_mesh("pp2-dp4-cp4-ep2"));
  for (int rank = 0; rank < 32; ++rank) {
    CHECK(count(svg, "font-weight=\"600\">" + std::to_string(rank) + "</text>") == 2);
  }
  CHECK(svg.substr(0, 5) == "<svg ");
  CHECK(svg.substr(svg.size() - 7) == "</svg>\n");
  CHECK(count(svg, "<text ") == count(svg, "</text>"));
  CHECK(count(svg, "<") == count(svg, ">"));
  CHECK(count(svg, "attention view") == 2);  // one panel per stage
  CHECK(count(svg, "stage pp = ") == 2);
  CHECK(count(svg, "cp of 4: inside a node") == 1);
  CHECK(count(svg, "pp of 2: up to 2 nodes") == 1);
  CHECK(count(svg, "stroke-width=\"1.6\"") == 2 * (4 + 8) + 2);  // every cp and ep group, and the legend
}

TEST_CASE("pictures of replicas and large worlds") {
  const std::string replicas = pleat::draw_svg(parse_mesh("dp4-ep2-r2"));
  CHECK(count(replicas, ">r1</text>") == 4);
  const std::string large = pleat::draw_svg(parse_mesh("pp16-dp512-cp128-ep64"));
  CHECK(count(large, "stages 1..15: the same") == 1);
  CHECK(count(large, "cut: 512 rows of 128 ranks in all") == 1);
  CHECK(large.size() < 1000000);
  CHECK(pleat::draw_svg(parse_mesh("dp2147483647-ep1")).size() < 1000000);
  CHECK(count(pleat::draw_svg(parse_mesh("dp2000000000-ep200000000")), "hsl(-") == 0);
}
