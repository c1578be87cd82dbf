// moe_leaf: the device code that the schedules of this folder call.
#pragma once

#include <pleat/core/device.hpp>
#include <pleat/core/executor.hpp>

namespace pleat::inline v0 {

/// Leaves of pleat::moe; specialized per device. Static members, ordered on the stream `s`, which do not communicate.
/// They take plans and raw pointers to dense row-major arrays; pointers to device data are never read by a schedule.
///
/// Router (router.hpp) and losses (losses.hpp):
/// - `route(plan, source, tokens, logits, bias, routed, ids, weights, probs, s)`
/// - `route_backward(plan, tokens, logits, ids, probs, dweights, dprobs, groups, dlogits, s)`
/// - `count_choices(experts, k, groups, tokens, ids, accumulate, counts, s)`
/// - `load_balance(plan, groups, tokens, ids, probs, counts, step, dprobs, value, scratch, s)`
/// - `router_z(plan, tokens, logits, ids, step, dlogits, value, scratch, s)`
/// - `update_bias(experts, dtype, counts, rate, bias, s)`
///
/// Dispatch and combine (dispatch.hpp); rows of another rank are found through a RowTable (row_table.hpp):
/// - `plan_sends(plan, tokens, planned_tokens, ids, record, scratch, status, s)`
/// - `sum_before(ranks, counts, before, s)`
/// - `pack(plan, tokens, x, ids, weights, record, outgoing, s)`
/// - `plan_rows(plan, rank, incoming, record, scratch, status, s)`, `expand(plan, incoming, record, s)`
/// - `expand_gradient(plan, incoming, out, record, dout, s)`
/// - `sum_experts(plan, expert_rows, weighted, record, outgoing, s)`
/// - `sum_sources(plan, tokens, incoming, record, y, dweights, status, s)`
///
/// Experts (experts.hpp):
/// - `gate_up(plan, rows, offsets, gate_w, up_w, gate, up, act, s)`, `down(plan, act, offsets, down_w, out, s)`
/// - `down_backward(plan, dout, offsets, down_w, gate, up, dgate, dup, act, s)`
/// - `gate_up_backward(plan, dgate, dup, offsets, gate_w, up_w, drows, s)`
/// - `weight_gradient(plan, d, d_cols, x, x_cols, offsets, accumulate, dw, s)`
template <class DeviceType>
struct moe_leaf {
  static_assert(
      detail::no_device<DeviceType>,
      "pleat[T03]: no MoE leaves for this device: include pleat/moe/host/leaf.hpp or pleat/moe/cuda/leaf.cuh");
};

}  // namespace pleat::inline v0
