// Exceptions, and the one way to raise them from code that also compiles for the device.
#pragma once

#include <new>  // std::exception, the base of std::bad_alloc; <exception> has more, and costs as much as the mesh headers

#include <pleat/core/config.hpp>
#include <pleat/core/message.hpp>

namespace pleat::inline v0 {

/// Base of everything pleat throws. `what()` starts with a stable id, `pleat[M02]: ...`; docs/errors.md lists them.
class [[gnu::visibility("default")]] error : public std::exception {
 public:
  explicit error(const Message& text) noexcept : text_(text) {}
  const char* what() const noexcept override {
    return text_.c_str();
  }

 private:
  Message text_;
};

/// A mesh, a rank or an axis that cannot be (ids M..).
class [[gnu::visibility("default")]] mesh_error : public error {
  using error::error;
};
/// Extents, strides, dtypes or sizes that do not fit together (ids T, F, A, E..).
class [[gnu::visibility("default")]] shape_error : public error {
  using error::error;
};
/// A communicator or a peer that failed: who, in which operation (ids C..).
class [[gnu::visibility("default")]] comm_error : public error {
  using error::error;
};
/// A CUDA call that failed.
class [[gnu::visibility("default")]] cuda_error : public error {
  using error::error;
};
/// An NCCL call that failed.
class [[gnu::visibility("default")]] nccl_error : public error {
  using error::error;
};

/// The text `parts` make, put one after the other.
template <class... Parts>
Message message_of(const Parts&... parts) {
  Message text;
  (append_part(text, parts), ...);
  return text;
}

/// Throws `Error` with the text that `parts` make; traps on the device.
template <class Error, class... Parts>
[[noreturn]] PLEAT_HD inline void fail([[maybe_unused]] const Parts&... parts) {
#if defined(__CUDA_ARCH__)
  __trap();
#else
  throw Error(message_of(parts...));
#endif
}

}  // namespace pleat::inline v0
