// The groups of pleat against those that Megatron-LM, its HyperCommGrid and DeepSpeed agree on.
#include <doctest/doctest.h>

#include <cstdint>
#include <pleat/mesh.hpp>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "support/json.hpp"
#include "support/meshes.hpp"

using pleat::Axis;
using pleat::AxisSet;
using pleat::Param;
using pleat::RuntimeMesh;
using testing_support::Json;
using testing_support::ranks_of;

namespace {

using Groups = std::vector<std::vector<int>>;

/// The kinds of groups in the order in which the file hashes them.
const std::pair<const char*, AxisSet> kinds[] = {{"pp", Axis::pp}, {"dp", Axis::dp},
                                                 {"cp", Axis::cp}, {"dp_cp", {Axis::dp, Axis::cp}},
                                                 {"ep", Axis::ep}, {"expt_dp", Axis::expert_dp}};

int degree(const Json& entry, const char* name) {
  return static_cast<int>(entry[name].integer());
}

RuntimeMesh mesh_of(const Json& entry) {
  return RuntimeMesh::fold({.world = degree(entry, "world"),
                            .pp = degree(entry, "pp"),
                            .cp = degree(entry, "cp"),
                            .ep = degree(entry, "ep"),
                            .replicas = entry.contains("hsdp_replica") ? degree(entry, "hsdp_replica") : 1});
}

std::vector<int> ints(const Json& list) {
  std::vector<int> all;
  for (const Json& item : list.array()) all.push_back(static_cast<int>(item.integer()));
  return all;
}
Groups all_groups(const RuntimeMesh& mesh, const AxisSet& axes) {
  Groups all;
  for (const pleat::Group group : groups(mesh, axes)) all.push_back(ranks_of(group));
  return all;
}
Groups listed(const Json& groups) {
  Groups all;
  for (const Json& group : groups.array()) all.push_back(ints(group));
  return all;
}
std::set<std::vector<int>> as_set(const Groups& groups) {
  return {groups.begin(), groups.end()};
}

/// FNV-1a of 64 bits over ranks as little-endian 32-bit numbers.
class Fnv {
 public:
  void add(int rank) {
    for (int byte = 0; byte < 4; ++byte) {
      hash_ ^= static_cast<std::uint32_t>(rank) >> (8 * byte) & 0xFFU;
      hash_ *= 0x100000001b3ULL;
    }
  }
  std::string hex() const {
    std::string text;
    for (int shift = 60; shift >= 0; shift -= 4) text += "0123456789abcdef"[hash_ >> shift & 0xFU];
    return text;
  }

 private:
  std::uint64_t hash_ = 0xcbf29ce484222325ULL;
};

Json facts() {
  return Json::facts("mesh_groups.json");
}

}  // namespace

TEST_CASE("groups of 60 meshes") {
  const Json file = facts();
  const Json::Array& configs = file["configs"].array();
  CHECK(configs.size() == 60);
  for (const Json& config : configs) {
    const RuntimeMesh mesh = mesh_of(config);
    CAPTURE(pleat::message_of(mesh).c_str());
    CHECK(mesh.dp == degree(config, "dp"));
    CHECK(mesh.expert_dp == degree(config, "expt_dp"));
    CHECK(mesh.stage_size == degree(config, "stage_size"));
    Fnv hash;
    for (const auto& kind : kinds) {
      const char* const name = kind.first;
      const AxisSet axes = kind.second;
      CAPTURE(name);
      const Groups ours = all_groups(mesh, axes);
      CHECK(static_cast<int>(ours.size()) == degree(config["num_groups"], name));
      CHECK(domains_spanned(group_shape(mesh, axes), mesh.world_size, 8) == degree(config["nodes_spanned_8gpu"], name));
      if (!config["groups"].is_null()) CHECK(ours == listed(config["groups"][name]));
      for (const std::vector<int>& group : ours) {
        for (const int rank : group) hash.add(rank);
      }
    }
    CHECK(hash.hex() == config["fnv1a64_u32le"].text());
  }
}

TEST_CASE("meshes that others refuse") {
  const Json file = facts();
  const Json::Array& errors = file["errors"].array();
  CHECK(errors.size() == 10);
  for (const Json& entry : errors) {
    const std::string theirs = entry["error"].text();
    const char* id = theirs.find("ZeroDivision") != std::string::npos ? "pleat[M00]"
                     : theirs.find("expert") != std::string::npos     ? "pleat[M02]"
                                                                      : "pleat[M01]";
    std::string ours;
    try {
      mesh_of(entry);
    } catch (const pleat::mesh_error& error) {
      ours = error.what();
    }
    CAPTURE(theirs);
    CHECK(ours.substr(0, 10) == id);
  }
}

TEST_CASE("HSDP groups, as sets") {
  const Json file = facts();
  const Json::Array& entries = file["hsdp"].array();
  CHECK(entries.size() == 15);
  for (const Json& entry : entries) {
    if (entry.contains("error")) {
      CHECK_THROWS_WITH_AS(mesh_of(entry), doctest::Contains("pleat[M03]"), pleat::mesh_error);
      continue;
    }
    const RuntimeMesh mesh = mesh_of(entry);
    Groups dense, expert, replicas;
    for (int rank = 0; rank < mesh.world_size; ++rank) {
      dense.push_back(ranks_of(mesh.shard_group<Param::dense>(rank)));
      expert.push_back(ranks_of(mesh.shard_group<Param::expert>(rank)));
      replicas.push_back(ranks_of(mesh.replica_group(rank)));
    }
    CAPTURE(pleat::message_of(mesh).c_str());
    CHECK(as_set(dense) == as_set(listed(entry["dense_shard"])));
    CHECK(as_set(expert) == as_set(listed(entry["expert_shard"])));
    CHECK(as_set(replicas) == as_set(listed(entry["dense_replicate"])));
    CHECK(as_set(replicas) == as_set(listed(entry["expert_replicate"])));
  }
}
