// Umbrella: Mixture-of-Experts templates and their host leaves.
#pragma once

#include <pleat/moe/dispatch.hpp>
#include <pleat/moe/experts.hpp>
#include <pleat/moe/host/leaf.hpp>
#include <pleat/moe/layer.hpp>
#include <pleat/moe/losses.hpp>
#include <pleat/moe/router.hpp>
#include <pleat/moe/router_z.hpp>
#include <pleat/moe/selection_bias.hpp>
