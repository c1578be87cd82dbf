// Umbrella: optimizers on shards, and their host leaves.
#pragma once

#include <pleat/optim/adamw.hpp>
#include <pleat/optim/host/leaf.hpp>
#include <pleat/optim/host/muon_leaf.hpp>
#include <pleat/optim/host/newton_schulz.hpp>
#include <pleat/optim/leaf.hpp>
#include <pleat/optim/muon.hpp>
#include <pleat/optim/muon_leaf.hpp>
#include <pleat/optim/muon_plan.hpp>
#include <pleat/optim/optimizer.hpp>
#include <pleat/optim/option_checks.hpp>
#include <pleat/optim/step_norm.hpp>
#include <pleat/optim/update_rules.hpp>
