// Shared: a value that ranks share, in memory that their processes map, or of one process whose ranks are threads.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>
#include <optional>
#include <stdexcept>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

namespace testing_support {

inline constexpr const char* shared_file_variable = "PLEAT_TEST_SHARED";
inline constexpr std::size_t shared_file_bytes = std::size_t{64} << 20;  // of which what is never used takes no memory

/// The file of zeros that shared_file_variable names, from which all processes take the same places in the same order.
class SharedPages {
 public:
  SharedPages() {
    const char* path = std::getenv(shared_file_variable);
    if (path == nullptr) throw std::runtime_error("ranks that are processes need a file to share");
    const int file = ::open(path, O_RDWR);
    void* pages = ::mmap(nullptr, shared_file_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (file < 0 || pages == MAP_FAILED) throw std::runtime_error("the file that ranks share cannot be mapped");
    ::close(file);
    next_ = static_cast<std::byte*>(pages);
    end_ = next_ + shared_file_bytes;
  }
  void* take(std::size_t bytes) {
    constexpr std::size_t line = 64;
    void* const place = next_;
    next_ += (bytes + line - 1) / line * line;
    if (next_ > end_) throw std::runtime_error("the file that ranks share is full");
    return place;
  }

 private:
  std::byte* next_;
  std::byte* end_;
};
/// Made with the first value: threads share without a file. The suites' backends have no object that could hold it.
inline std::optional<SharedPages> shared_pages;

/// All ranks make it at the same point of a check; it is `T{}`, which must be zero bytes. Kept until the program ends.
template <class T>
class Shared {
 public:
  Shared() {
    const bool is_one_process = std::getenv(shared_file_variable) == nullptr;
    if (!is_one_process && !shared_pages) shared_pages.emplace();
    value_ = is_one_process ? new T{} : static_cast<T*>(shared_pages->take(sizeof(T)));
  }
  T* operator->() const { return value_; }

 private:
  T* value_;
};

}  // namespace testing_support
