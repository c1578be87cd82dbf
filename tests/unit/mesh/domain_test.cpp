#include <doctest/doctest.h>

#include <pleat/mesh/domain.hpp>
#include <pleat/mesh/folded_mesh.hpp>
#include <pleat/mesh/runtime_mesh.hpp>
#include <set>

#include "support/meshes.hpp"

using pleat::Axis;
using testing_support::at_compile_time;

TEST_CASE("cp 3 on 12 ranks: {6, 7, 8} lies on both sides of a node of 8") {
  using Mesh = pleat::FoldedMesh<1, 4, 3, 1>;
  CHECK(at_compile_time(!Mesh::fits_domain<Axis::cp>(8)));
  CHECK(at_compile_time(Mesh::fits_domain<Axis::cp>(6)));
  CHECK(at_compile_time(pleat::domains_spanned<Axis::cp>(Mesh{}, 8) == 2));
  CHECK(at_compile_time(Mesh::fits_domain<Axis::dp, Axis::cp>(72)));  // one domain larger than the world
}

TEST_CASE("the largest worlds are counted without a visit to every rank") {
  constexpr int largest = 2147483647;
  const auto spanned = [](const pleat::MeshDegrees& degrees, Axis axis, int gpus) {
    const pleat::RuntimeMesh mesh(degrees);
    return pleat::domains_spanned(group_shape(mesh, axis), mesh.world_size, gpus);
  };
  CHECK(spanned({.pp = largest}, Axis::pp, 8) == 268435456);
  CHECK(spanned({.dp = largest, .ep = largest}, Axis::ep, 8) == 268435456);
  CHECK(spanned({.dp = largest}, Axis::dp, largest) == 1);
  CHECK(spanned({.dp = 1 << 29, .cp = 3}, Axis::cp, 8) == 2);
  CHECK(spanned({.dp = 1 << 29, .cp = 3}, Axis::cp, 1000000007) == 2);  // one border, inside a group
  CHECK(spanned({.dp = 1 << 29, .cp = 3}, Axis::cp, 1000000008) == 1);  // one border, between two groups
  CHECK(spanned({.dp = 1 << 29, .cp = 3}, Axis::dp, 1000000007) == 2);
  CHECK(spanned({.pp = 2, .dp = 1 << 29}, Axis::pp, 1 << 28) == 2);
}

TEST_CASE("fits_domain is what counting domains says") {
  testing_support::for_each_mesh(16, [](const pleat::RuntimeMesh& mesh) {
    if (mesh.replicas != 1) return;
    for (const pleat::AxisSet axes :
         {pleat::AxisSet(Axis::pp), pleat::AxisSet(Axis::dp), pleat::AxisSet(Axis::cp),
          pleat::AxisSet(Axis::dp, Axis::cp), pleat::AxisSet(Axis::ep), pleat::AxisSet(Axis::expert_dp),
          pleat::AxisSet(Axis::pp, Axis::cp), pleat::AxisSet(Axis::pp, Axis::ep)}) {
      for (int gpus = 1; gpus <= mesh.world_size + 1; ++gpus) {
        std::size_t most = 0;
        for (const pleat::Group group : groups(mesh, axes)) {
          std::set<int> domains;
          for (const int rank : group) domains.insert(rank / gpus);
          most = std::max(most, domains.size());
        }
        const pleat::GroupShape shape = group_shape(mesh, axes);
        CAPTURE(mesh.world_size);
        CAPTURE(gpus);
        REQUIRE(pleat::fits_domain(shape, mesh.world_size, gpus) == (most == 1));
        REQUIRE(pleat::domains_spanned(shape, mesh.world_size, gpus) == static_cast<int>(most));
      }
    }
  });
}
