// Counts what a thread allocates with new. Replaces operator new and delete: one translation unit of a program includes
// it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace testing_support {

inline thread_local std::int64_t allocations = 0;

/// How often this thread allocates while `f` runs.
template <class F>
std::int64_t allocations_of(F&& f) {
  const std::int64_t before = allocations;
  f();
  return allocations - before;
}

inline void* counted(void* memory) {
  ++allocations;
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace testing_support

#ifdef __NVCC__  // which takes them for functions of devices, too
#pragma nv_diag_suppress 20011, 20014
#endif
// All forms: a sanitizer's own would not go with these. Inlined, g++ would take them for a mismatch of new and free.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  return testing_support::counted(std::malloc(bytes == 0 ? 1 : bytes));
}
[[gnu::noinline]] void* operator new(std::size_t bytes, std::align_val_t alignment) {
  const auto multiple = static_cast<std::size_t>(alignment);
  return testing_support::counted(std::aligned_alloc(multiple, (bytes + multiple) / multiple * multiple));
}
[[gnu::noinline]] void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  ++testing_support::allocations;
  return std::malloc(bytes == 0 ? 1 : bytes);
}
[[gnu::noinline]] void* operator new(std::size_t bytes, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  ++testing_support::allocations;
  const auto multiple = static_cast<std::size_t>(alignment);
  return std::aligned_alloc(multiple, (bytes + multiple) / multiple * multiple);
}
[[gnu::noinline]] void* operator new[](std::size_t bytes) {
  return operator new(bytes);
}
[[gnu::noinline]] void* operator new[](std::size_t bytes, std::align_val_t alignment) {
  return operator new(bytes, alignment);
}
[[gnu::noinline]] void* operator new[](std::size_t bytes, const std::nothrow_t& tag) noexcept {
  return operator new(bytes, tag);
}
[[gnu::noinline]] void* operator new[](std::size_t bytes, std::align_val_t alignment,
                                       const std::nothrow_t& tag) noexcept {
  return operator new(bytes, alignment, tag);
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::align_val_t) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t, std::align_val_t) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete[](void* memory) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete[](void* memory, std::size_t) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete[](void* memory, std::align_val_t) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept {
  std::free(memory);
}
