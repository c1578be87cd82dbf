// The exception of checkpoints.
#pragma once

#include <pleat/core/error.hpp>

namespace pleat::inline v0 {

/// A checkpoint that cannot be written, or is not what is asked for (ids K..).
class [[gnu::visibility("default")]] checkpoint_error : public error {
  using error::error;
};

}  // namespace pleat::inline v0
