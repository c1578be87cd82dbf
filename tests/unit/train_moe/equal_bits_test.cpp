// What must not change a bit: the mesh's type, the transport, the prefetch; and what one must not change: where a run
// starts.
#include <doctest/doctest.h>

#include "small_run.hpp"

using namespace train_moe;

namespace {

void check_equal(const RunResult& a, const RunResult& b) {
  REQUIRE(a.reports.size() == b.reports.size());
  for (std::size_t step = 0; step < a.reports.size(); ++step) {
    CHECK(a.reports[step].loss == b.reports[step].loss);
    CHECK(a.reports[step].balance == b.reports[step].balance);
    CHECK(a.reports[step].norm == b.reports[step].norm);
  }
  CHECK(a.parameters.pages() == b.parameters.pages());
}

template <class T>
void check_mesh() {
  const TextFile text(4000);
  Options o = options_of({"--text",        text.name().c_str(),
                          "--mesh",        "pp1-dp4-cp2-ep4-r2",
                          "--seq",         "16",
                          "--layers",      "2",
                          "--hidden",      "16",
                          "--experts",     "8",
                          "--batch",       "8",
                          "--micro-batch", "1",
                          "--steps",       "3",
                          "--lr",          "0.01"});
  RunResult base;
  run_steps<T>(o.mesh, o, base);
  CHECK(base.reports.size() == 3);
  CHECK(base.reports[0].loss != base.reports[2].loss);

  SUBCASE("a static mesh") {
    RunResult other;
    run_steps<T>(pleat::FoldedMesh<1, 4, 2, 4, 2>{}, o, other);
    check_equal(base, other);
  }
  SUBCASE("collectives") {
    RunResult other;
    o.transport = pleat::Transport::collective;
    run_steps<T>(o.mesh, o, other);
    check_equal(base, other);
  }
  SUBCASE("other prefetches") {
    for (const int prefetch : {0, 3}) {
      RunResult other;
      o.prefetch = prefetch;
      run_steps<T>(o.mesh, o, other);
      check_equal(base, other);
    }
  }
  SUBCASE("another seed is another run") {
    RunResult other;
    o.seed = 2;
    run_steps<T>(o.mesh, o, other);
    CHECK(base.reports[0].loss != other.reports[0].loss);
  }
}

}  // namespace

TEST_CASE("bits do not depend on the type of the mesh, the transport or the prefetch") {
  check_mesh<double>();
}
TEST_CASE("neither in float") {
  check_mesh<float>();
}
