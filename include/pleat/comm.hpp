// Umbrella: communicators on host ranks, peer memory, the communicators of a mesh.
#pragma once

#include <pleat/comm/communicator.hpp>
#include <pleat/comm/group_comm.hpp>
#include <pleat/comm/memory.hpp>
#include <pleat/comm/mesh_comms.hpp>
#include <pleat/comm/ordered_sum.hpp>
#include <pleat/comm/peer_access.hpp>
#include <pleat/comm/peer_window.hpp>
#include <pleat/comm/rank_values.hpp>
#include <pleat/comm/run_ranks.hpp>
#include <pleat/comm/thread_arena.hpp>
#include <pleat/comm/thread_comm.hpp>
#include <pleat/comm/thread_ranks.hpp>
#include <pleat/core/host/buffer.hpp>
#include <pleat/core/host/executor.hpp>
#include <pleat/core/host/leaf.hpp>
