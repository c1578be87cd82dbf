// Umbrella: sharded parameters, and what host ranks need for them.
#pragma once

#include <pleat/core/host/executor.hpp>
#include <pleat/core/host/leaf.hpp>
#include <pleat/fsdp/agreement.hpp>
#include <pleat/fsdp/gatherer.hpp>
#include <pleat/fsdp/layout.hpp>
#include <pleat/fsdp/order_check.hpp>
#include <pleat/fsdp/plan.hpp>
#include <pleat/fsdp/reducer.hpp>
#include <pleat/fsdp/shard_memory.hpp>
#include <pleat/fsdp/shard_state.hpp>
#include <pleat/fsdp/sharded_model.hpp>
#include <pleat/fsdp/sharder.hpp>
#include <pleat/fsdp/transport.hpp>
#include <pleat/fsdp/view.hpp>
