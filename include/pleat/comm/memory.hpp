// The memory a caller gives an operation at bind.
#pragma once

#include <type_traits>

#include <pleat/comm/peer_access.hpp>
#include <pleat/core/block.hpp>

namespace pleat::inline v0 {

/// What a Memory may carry.
template <class Arena>
concept optional_arena = std::is_void_v<Arena> || symmetric_arena<Arena>;

/// What `footprint()` asked for: borrowed blocks of the device, each at least that large, and the arena (null when the
/// plan moves bytes by collectives; `Memory<>` for operations without peers). `scratch` may be shared by operations
/// that never run at the same time; `persistent` is the operation's own as long as it lives; `pinned_host` is host
/// memory.
template <optional_arena Arena = void>
struct Memory {
  Block scratch = {};
  Block persistent = {};
  Block pinned_host = {};
  Arena* arena = nullptr;
};

}  // namespace pleat::inline v0
