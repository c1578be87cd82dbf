// Where the tensors of a model lie on a rank, for saves and loads.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include <pleat/checkpoint/model.hpp>
#include <pleat/fsdp/shard_memory.hpp>

namespace pleat::inline v0::checkpoint {

/// A unit's memory on a rank; borrowed, in the device's memory. Arrays may be null where the rank holds nothing in
/// them.
struct UnitMemory {
  void* master = nullptr;
  /// What is gathered, of `compute_dtype`; null when the master itself is. Written by loads.
  void* compute = nullptr;
  DType compute_dtype = DType::f32;
  /// One array per state of the model, in its order.
  std::vector<void*> states = {};
};

/// The memory of units of a Sharder and of the optimizers in pleat::optim, for the states that Model has by default:
/// `shards()`, `Adamw::moments()` and `Muon::momentum()`, each [unit].
template <class Shards, class Moments, class Momentum>
std::vector<UnitMemory> unit_memory(const Shards& shards, const Moments& moments, const Momentum& momentum) {
  std::vector<UnitMemory> units;
  for (std::size_t u = 0; u < shards.size(); ++u) {
    const fsdp::ShardMemory& shard = shards[u];
    units.push_back(
        {shard.master, shard.compute, shard.compute_dtype, {moments[u].first, moments[u].second, momentum[u]}});
  }
  return units;
}

/// Array `array` of unit `unit`. Errors: checkpoint_error K10 when it was not given.
inline std::byte* array_of(std::span<const UnitMemory> memory, int unit, int array) {
  const auto u = static_cast<std::size_t>(unit), state = static_cast<std::size_t>(array - 1);
  void* found = nullptr;
  if (u < memory.size()) {
    if (array == master_array) {
      found = memory[u].master;
    } else if (state < memory[u].states.size()) {
      found = memory[u].states[state];
    }
  }
  if (found == nullptr) {
    fail<checkpoint_error>("pleat[K10]: the memory of ", memory.size(), " units lacks ",
                           array == master_array ? "the masters" : "a state", " of unit ", unit,
                           "; give the memory of all units of the rank's stage, with the states of the model");
  }
  return static_cast<std::byte*>(found);
}

}  // namespace pleat::inline v0::checkpoint
