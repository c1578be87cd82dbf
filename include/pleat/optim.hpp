// Umbrella: optimizers on shards, and their host leaves.
#pragma once

#include <pleat/optim/adamw.hpp>
#include <pleat/optim/host/leaf.hpp>
#include <pleat/optim/leaf.hpp>
#include <pleat/optim/step_norm.hpp>
#include <pleat/optim/update_rules.hpp>
