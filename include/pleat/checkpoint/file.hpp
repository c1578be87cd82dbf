// Files and folders, as few calls as checkpoints need: whole reads and writes, fsync, rename.
#pragma once

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <pleat/checkpoint/error.hpp>

namespace pleat::inline v0::checkpoint {

/// Whether a link at the end of a path is followed: not where every file was written by this library.
enum class Links : unsigned char { refuse, follow };

/// Errors: checkpoint_error K07, always, with the text of `errno`.
[[noreturn]] inline void fail_system(const char* call, const std::string& path) {
  fail<checkpoint_error>("pleat[K07]: ", call, " of ", path, " failed: ", std::strerror(errno));
}

/// Errors: checkpoint_error K06 unless `name` is a plain name, so that `folder/name` lies in the folder.
inline void check_plain_name(const std::string& name, const std::string& where) {
  if (name.empty() || name == "." || name == ".." || name.find('/') != std::string::npos ||
      name.find('\0') != std::string::npos) {
    fail<checkpoint_error>("pleat[K06]: ", where, " names the file '", name.c_str(),
                           "', which leaves its folder; file names are plain names");
  }
}

/// `folder/name`.
inline std::string path_in(const std::string& folder, std::string_view name) {
  std::string path = folder;
  path += '/';
  return path += name;
}

/// An open file, owned. Errors of all calls: checkpoint_error K07, with the system's text.
class File {
 public:
  /// Opens to read; makes or empties a file to write; opens a folder, to sync it.
  static File read(const std::string& path, Links links = Links::refuse) {
    return File("open", path, O_RDONLY | (links == Links::refuse ? O_NOFOLLOW : 0));
  }
  static File create(const std::string& path) {
    return File("create", path, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW);
  }
  static File folder(const std::string& path) { return File("open", path, O_RDONLY | O_DIRECTORY); }

  File(File&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)), path_(std::move(other.path_)) {}
  File& operator=(File&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    std::swap(path_, other.path_);
    return *this;
  }
  ~File() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }

  /// Errors: K07 also when it is no regular file.
  std::uint64_t size_bytes() const {
    struct stat info {};
    if (::fstat(descriptor_, &info) != 0) fail_system("fstat", path_);
    if (!S_ISREG(info.st_mode)) fail<checkpoint_error>("pleat[K07]: ", path_, " is no regular file");
    return static_cast<std::uint64_t>(info.st_size);
  }
  /// Reads all of `bytes` at `offset`. Errors: K02 when the file ends before.
  void read_at(void* to, std::uint64_t bytes, std::uint64_t offset) const {
    for (std::uint64_t done = 0; done < bytes;) {
      const auto part = static_cast<std::size_t>(std::min(bytes - done, max_call_bytes));
      const ::ssize_t got =
          ::pread(descriptor_, static_cast<char*>(to) + done, part, static_cast<::off_t>(offset + done));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) fail_system("read", path_);
      if (got == 0) {
        fail<checkpoint_error>("pleat[K02]: ", path_, " ends at byte ", offset + done, " of ", offset + bytes,
                               "; the file is truncated");
      }
      done += static_cast<std::uint64_t>(got);
    }
  }
  void write(const void* from, std::uint64_t bytes) const {
    for (std::uint64_t done = 0; done < bytes;) {
      const auto part = static_cast<std::size_t>(std::min(bytes - done, max_call_bytes));
      const ::ssize_t put = ::write(descriptor_, static_cast<const char*>(from) + done, part);
      if (put < 0 && errno == EINTR) continue;
      if (put < 0) fail_system("write", path_);
      done += static_cast<std::uint64_t>(put);
    }
  }
  /// What was written to the file, or the names of the folder, outlive a loss of power.
  void sync() const {
    if (::fsync(descriptor_) != 0) fail_system("fsync", path_);
  }

 private:
  static constexpr std::uint64_t max_call_bytes = std::uint64_t{1} << 30;

  File(const char* call, const std::string& path, int flags)
      : descriptor_(::open(path.c_str(), flags | O_CLOEXEC, 0666)), path_(path) {
    if (descriptor_ < 0) fail_system(call, path_);
  }

  int descriptor_;
  std::string path_;
};

/// The whole file. Errors: K07; K02 when it has more than `max_bytes`.
inline std::string read_text(const std::string& path, Links links, std::uint64_t max_bytes) {
  const File file = File::read(path, links);
  const std::uint64_t bytes = file.size_bytes();
  if (bytes > max_bytes) {
    fail<checkpoint_error>("pleat[K02]: ", path, " has ", bytes, " bytes, more than the ", max_bytes, " it can have");
  }
  std::string text(bytes, '\0');
  file.read_at(text.data(), bytes, 0);
  return text;
}

/// Replaces what is at `to`, at once. Errors: checkpoint_error K07.
inline void rename(const std::string& from, const std::string& to) {
  if (std::rename(from.c_str(), to.c_str()) != 0) fail_system("rename", from);
}
/// Writes `parts` to `folder/name`, so that whoever sees the name sees the whole file, also after a loss of power.
inline void write_whole(const std::string& folder, const std::string& name, std::span<const std::string_view> parts) {
  const std::string path = path_in(folder, name), unfinished = path + ".unfinished";
  {
    const File file = File::create(unfinished);
    for (const std::string_view part : parts) file.write(part.data(), part.size());
    file.sync();
  }
  rename(unfinished, path);
  File::folder(folder).sync();
}

/// Whether something has this name, a link that leads nowhere too.
inline bool exists(const std::string& path) {
  struct stat info {};
  return ::lstat(path.c_str(), &info) == 0;
}
/// The size of a regular file, -1 when there is none.
inline std::int64_t size_of_file(const std::string& path) {
  struct stat info {};
  return ::lstat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode) ? static_cast<std::int64_t>(info.st_size) : -1;
}
/// Makes a folder unless it is there.
inline void make_folder(const std::string& path) {
  if (::mkdir(path.c_str(), 0777) != 0 && errno != EEXIST) fail_system("mkdir", path);
}
/// The names in a folder, in no order; none when there is no folder.
inline std::vector<std::string> names_in(const std::string& path) {
  std::vector<std::string> names;
  ::DIR* const folder = ::opendir(path.c_str());
  if (folder == nullptr) {
    if (errno != ENOENT) fail_system("opendir", path);
    return names;
  }
  while (const ::dirent* entry = ::readdir(folder)) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(name);
  }
  ::closedir(folder);
  return names;
}
/// Removes a folder of files.
inline void remove_folder(const std::string& path) {
  for (const std::string& name : names_in(path)) {
    const std::string file = path_in(path, name);
    if (::unlink(file.c_str()) != 0 && errno != ENOENT) fail_system("unlink", file);
  }
  if (::rmdir(path.c_str()) != 0 && errno != ENOENT) fail_system("rmdir", path);
}

}  // namespace pleat::inline v0::checkpoint
