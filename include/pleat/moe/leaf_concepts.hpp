// What a device's leaves must look like, as concepts: a wrong signature is one line, beside the leaf.
#pragma once

#include <pleat/moe/dispatch_plan.hpp>
#include <pleat/moe/experts.hpp>
#include <pleat/moe/losses.hpp>
#include <pleat/moe/router.hpp>
#include <pleat/moe/router_z.hpp>

namespace pleat::inline v0::moe {

/// - `route`: what Router::choose and Router::weigh say; `source` tells where ids come from; bias, routed may be null.
/// - `route_backward`: what Router::backward says; `dprobs` may be null.
template <class L, class Stream>
concept router_leaf = requires(const RouterPlan& plan, IdSource source, std::int64_t n, const void* in,
                               const std::uint8_t* routed, const std::int32_t* given, std::int32_t* ids, void* out,
                               Stream s) {
  L::route(plan, source, n, in, in, routed, ids, out, out, s);
  L::route_backward(plan, n, in, given, in, in, in, n, out, s);
};

/// - `count_choices`: counts [groups, experts + 1] (accumulate ? += : =) choices of each expert, then routed tokens.
/// - `load_balance`: from those, summed over ranks, dprobs and this rank's part of the value: see LoadBalance::forward.
/// - `router_z`: what RouterZ::backward says.
/// - `update_bias`: what SelectionBias::update says.
/// `scratch` has `loss_partials` doubles.
template <class L, class Stream>
concept loss_leaf = requires(const LoadBalancePlan& plan, const RouterZPlan& z, int n, std::int64_t tokens,
                             const std::int32_t* ids, const void* in, const double* counted, const StepTokens* step,
                             void* out, double* sum, DType dtype, Stream s) {
  L::count_choices(n, n, tokens, tokens, ids, true, sum, s);
  L::load_balance(plan, tokens, tokens, ids, in, counted, step, out, sum, sum, s);
  L::router_z(z, tokens, in, ids, step, out, sum, sum, s);
  L::update_bias(n, dtype, counted, 1.0, out, s);
};

/// Rows of other ranks are found through tables; arrays of the record are described with it (dispatch_record.hpp).
/// - `plan_sends`: sent, own_tokens and send_counts, from the ids of `planned` tokens; where `tokens` are more, counts
///   below 0.
/// - `sum_before`: before[p] = sum of the counts before p; a count below 0 is no row.
/// - `pack_headers`: the headers of all rows that are sent, and the counts beside them.
/// - `pack`: the rows of x that go to other ranks.
/// - `plan_rows`: recv_counts, entries, offsets, ends and dropped, from the headers and counts that came; of an arena,
///   the rows behind those in use, as offsets say then.
/// - `expand`: the record's rows, of the sources that are given; `expand_gradient`, of those: dout = weight * dy of a
///   row's token, and entry_dweights = <dy, out>; dout may be out. With own rows, both zero pad rows.
/// - `sum_experts`: sends back one row per row that came: the sum over its entries, weighted and with `dropped` beside
///   the rows, or plain and with the weights' gradients in the header.
/// - `sum_sources`: adds up the residual, unless it is null, and the answers per token, and the gradients in their
///   headers unless `dweights` is null; the result may be the residual. With a status, notes what ranks dropped.
template <class L, class Stream>
concept dispatch_leaf = requires(const DispatchPlan& plan, int rank, std::int64_t n, const std::int32_t* ids,
                                 const void* in, void* out, DispatchRecord& r, const RowTable& table,
                                 const SourceRows& source, const PlanScratch& scratch, DispatchStatus* status,
                                 std::int64_t* sums, Stream s) {
  L::plan_sends(plan, rank, n, n, ids, r, scratch, status, s);
  L::sum_before(rank, sums, sums, s);
  L::pack_headers(plan, n, ids, in, r, table, s);
  L::pack(plan, rank, n, in, r, table, s);
  L::plan_rows(plan, rank, table, r, scratch, status, s);
  L::expand(plan, source, r, s);
  L::expand_gradient(plan, source, in, r, out, s);
  L::sum_experts(plan, in, true, r, table, s);
  L::sum_sources(plan, n, table, r, in, out, out, status, s);
};

/// All leaves of a device that the layer calls; `expert_leaf` is in experts.hpp.
template <class L, class Stream>
concept moe_leaves =
    router_leaf<L, Stream> && loss_leaf<L, Stream> && dispatch_leaf<L, Stream> && expert_leaf<L, Stream>;

}  // namespace pleat::inline v0::moe
