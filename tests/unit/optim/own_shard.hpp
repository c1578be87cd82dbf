// A shard made by hand, for tests of optimizers without a Sharder.
#pragma once

#include <vector>

#include <pleat/optim/leaf.hpp>

namespace optim_testing {

/// A master of `T`, its gradient, two moments and, for another compute type, a copy; one piece over all of it.
template <class T, class Compute = T>
struct OwnShard {
  std::vector<T> master, gradient, first, second;
  std::vector<Compute> compute;
  std::vector<pleat::fsdp::UpdatePiece> pieces;

  explicit OwnShard(std::vector<T> values)
      : master(values),
        gradient(values.size()),
        first(values.size()),
        second(values.size()),
        compute(values.size()),
        pieces{piece(0, static_cast<std::int64_t>(values.size()))} {}

  /// A piece whose moments lie where it does.
  static pleat::fsdp::UpdatePiece piece(std::int64_t begin, std::int64_t elems, double norm_weight = 1,
                                        bool weight_decay = true) {
    return {begin, elems, norm_weight, weight_decay, pleat::fsdp::Optimizer::adamw, begin};
  }

  pleat::fsdp::ShardMemory memory() {
    return {master.data(),
            gradient.data(),
            std::is_same_v<T, Compute> ? nullptr : static_cast<void*>(compute.data()),
            pleat::dtype_of<T>,
            pleat::dtype_of<Compute>,
            static_cast<std::int64_t>(master.size()),
            pieces.data(),
            static_cast<std::int64_t>(pieces.size())};
  }
};

}  // namespace optim_testing
