// The ring's channels keep the discipline of credits, so that its calls may be captured in a graph.
#include <pleat/attention.hpp>
#include <pleat/attention/host/leaf.hpp>
#include <pleat/comm.hpp>

#include <memory>
#include <vector>

#include <doctest/doctest.h>

#include "support/credit_discipline.hpp"

namespace {

using namespace pleat;
using testing_support::DisciplineArena;
using testing_support::DisciplineLog;

TEST_CASE("no channel of the ring carries two signals at once") {
  for (const int cp : {2, 3, -3, 4, 5, -5}) {  // below 0: forward in one launch
    CAPTURE(cp);
    const ring::Plan plan = ring::plan(std::abs(cp),
                                       {.batch = 1,
                                        .tokens = 8 * std::abs(cp),
                                        .q_heads = 2,
                                        .kv_heads = 1,
                                        .qk_dim = 4,
                                        .v_dim = 4,
                                        .dtype = DType::f64},
                                       {.causal = true,
                                        .transport = Transport::peer,
                                        .launches = cp < 0 ? ring::Launches::one : ring::Launches::per_step});
    const auto log = std::make_shared<DisciplineLog>();
    run_ranks(plan.cp, [&](ThreadComm& world) {
      const GroupComm<ThreadComm> group(world);
      const Footprint need = plan.footprint();
      DisciplineArena arena(group, need.symmetric, log, plan.cp);
      HostBuffer scratch(need.scratch), persistent(need.persistent), pinned(need.pinned_host), lse(need.saved);
      auto op = ring::bind(plan, HostExecutor{}, group,
                           Memory<DisciplineArena>{scratch.block(), persistent.block(), pinned.block(), &arena});
      const std::int64_t tokens = plan.spans[static_cast<std::size_t>(world.rank())].tokens();
      const auto zeros = [&](int heads) { return std::vector<double>(static_cast<std::size_t>(tokens * heads * 4)); };
      const auto view = [&](std::vector<double>& rows, int heads) {
        return TensorRef(rows.data(), {1, tokens, heads, 4});
      };
      auto q = zeros(2), k = zeros(1), v = zeros(1), out = zeros(2), dq = zeros(2), dk = zeros(1), dv = zeros(1);
      for (int call = 0; call < 3; ++call) {
        ring::Saved saved(lse.block());
        op.forward({}, view(q, 2), view(k, 1), view(v, 1), view(out, 2), saved);
        op.backward({}, view(out, 2), saved, view(dq, 2), view(dk, 1), view(dv, 1));
      }
    });
    CHECK(log->breaches() == "");
  }
}

}  // namespace
