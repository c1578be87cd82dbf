// A borrowed block of bytes.
#pragma once

#include <cstddef>

namespace pleat::inline v0 {

/// `data` is aligned to `Carver::alignment_bytes`.
struct Block {
  std::byte* data = nullptr;
  std::size_t size_bytes = 0;
};

}  // namespace pleat::inline v0
