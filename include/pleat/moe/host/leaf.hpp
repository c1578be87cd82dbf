// The leaves of pleat::moe on the host.
#pragma once

#include <pleat/moe/host/dispatch.hpp>
#include <pleat/moe/host/experts.hpp>
#include <pleat/moe/host/losses.hpp>
#include <pleat/moe/host/router.hpp>
#include <pleat/moe/leaf_concepts.hpp>

namespace pleat::inline v0 {

template <>
struct moe_leaf<host_device> : moe::detail::HostRouterLeaf,
                               moe::detail::HostLossLeaf,
                               moe::detail::HostDispatchLeaf,
                               moe::detail::HostExpertLeaf {};
static_assert(moe::moe_leaves<moe_leaf<host_device>, HostStream>);

}  // namespace pleat::inline v0
