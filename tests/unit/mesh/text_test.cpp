#include <doctest/doctest.h>

#include <pleat/mesh/folded_mesh.hpp>
#include <pleat/mesh/text.hpp>

using pleat::mesh_error;
using pleat::parse_mesh;
using pleat::RuntimeMesh;

TEST_CASE("a mesh as text") {
  CHECK(pleat::to_string(pleat::FoldedMesh<2, 4, 4, 2>{}) == "pp2-dp4-cp4-ep2");
  CHECK(pleat::to_string(RuntimeMesh::fold({.world = 16, .cp = 4, .ep = 4, .replicas = 2})) == "pp1-dp4-cp4-ep4-r2");
  CHECK(parse_mesh("pp2-dp4-cp4-ep2") == RuntimeMesh(pleat::FoldedMesh<2, 4, 4, 2>{}));
  CHECK(parse_mesh("r2-ep4-cp4-dp4") == RuntimeMesh::fold({.world = 16, .cp = 4, .ep = 4, .replicas = 2}));
  CHECK(parse_mesh("dp8").expert_dp == 8);
}

TEST_CASE("[M09] a text that is no mesh") {
  CHECK_THROWS_WITH_AS(
      parse_mesh("pp2-tp4"),
      "pleat[M09]: \"pp2-tp4\" is not a mesh: \"tp4\" is no part of one; valid: pp, dp, cp, ep and r, each "
      "at most once, as in pp2-dp4-cp4-ep2 or pp1-dp4-cp4-ep4-r2",
      mesh_error);
  const auto refuses = [](const char* text, const char* why) {
    CHECK_THROWS_WITH_AS(parse_mesh(text), doctest::Contains(why), mesh_error);
  };
  refuses("pp1_dp4", "\"pp1_dp4\" has more behind its number, and parts are joined by \"-\"");
  refuses("pp2-dp99999999999", "\"dp99999999999\" has a number that does not fit in int");
  refuses("pp2-dp", "\"dp\" needs a number;");
  for (const char* text : {"", "-", "pp2-", "-pp2", "pp2--dp2", "pp", "pp2x", "2", "pp 2", "PP2", "pp+2", "pp2-dp2-pp2",
                           "dp99999999999", "dp2,cp2"}) {
    CAPTURE(text);
    CHECK_THROWS_WITH_AS(parse_mesh(text), doctest::Contains("pleat[M09]"), mesh_error);
  }
  CHECK_THROWS_WITH_AS(parse_mesh("pp0"), "pleat[M00]: pp=0 must be at least 1", mesh_error);
  CHECK_THROWS_WITH_AS(parse_mesh("dp4-ep3"), "pleat[M02]: ep=3 does not divide stage=4; valid ep: 1 2 4", mesh_error);
  CHECK_THROWS_WITH_AS(parse_mesh("dp65536-cp65536"), doctest::Contains("pleat[M00]"), mesh_error);
}

TEST_CASE("the drawing of a small mesh") {
  CHECK(pleat::draw_text(parse_mesh("dp1")).find("pp1-dp1-cp1-ep1: 1 rank = 1 stage of 1\n") == 0);
  CHECK(pleat::draw_text(parse_mesh("dp4-cp3-ep4")) ==
        R"(pp1-dp4-cp3-ep4: 12 ranks = 1 stage of 12
rows are cp and ep groups, columns dp and expert_dp groups; | starts a node of 8

stage pp=0
  attention view: dp 4 x cp 3      expert view: expert_dp 3 x ep 4
    cp    0   1   2                         ep    0   1   2   3
  dp 0  | 0   1   2                expert_dp 0  | 0   1   2   3
     1    3   4   5                          1    4   5   6   7
     2    6   7 | 8                          2  | 8   9  10  11
     3    9  10  11

groups of stage pp=0: the same letter in a line is the same group
  rank         0   1   2   3   4   5   6   7   8   9  10  11
  cp           a   a   a   b   b   b   c   c   c   d   d   d
  dp           a   b   c   a   b   c   a   b   c   a   b   c
  ep           a   a   a   a   b   b   b   b   c   c   c   c
  expert_dp    a   b   c   d   a   b   c   d   a   b   c   d

nodes of 8
  cp         groups of 3: up to 2 nodes
  dp         groups of 4: up to 2 nodes
  dp x cp    groups of 12: up to 2 nodes
  ep         groups of 4: inside one node
  expert_dp  groups of 3: up to 2 nodes
)");
}

TEST_CASE("drawings of replicas, stages and large worlds") {
  const std::string replicas = pleat::draw_text(parse_mesh("dp4-ep2-r2"), {.gpus_per_domain = 4});
  CHECK(replicas.find("replica     0  0  1  1") != std::string::npos);
  CHECK(replicas.find("| starts a node of 4") != std::string::npos);
  const std::string stages = pleat::draw_text(parse_mesh("pp3-dp2"));
  CHECK(stages.find("stage pp=2") != std::string::npos);

  const std::string large = pleat::draw_text(parse_mesh("pp16-dp512-cp128-ep64"));
  CHECK(large.find("stages 1..15: the same, each 65536 ranks further on") != std::string::npos);
  CHECK(large.size() < 20000);
  CHECK(pleat::draw_text(parse_mesh("pp2147483647")).find("up to 268435456 nodes") != std::string::npos);
  CHECK(pleat::draw_text(parse_mesh("dp2147483647-ep2147483647")).size() < 20000);
  CHECK_THROWS_WITH_AS(pleat::draw_text(parse_mesh("dp2"), {.gpus_per_domain = 0}),
                       "pleat[M00]: gpus_per_domain=0 must be at least 1", mesh_error);
}
