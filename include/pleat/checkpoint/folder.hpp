// The folder of a run's checkpoints: which are whole, and removing the old.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include <pleat/checkpoint/file.hpp>

namespace pleat::inline v0::checkpoint {

/// What names of folders have that are no checkpoints yet, or no longer.
inline constexpr const char* unfinished_mark = ".unfinished-";
inline constexpr const char* removed_mark = ".removed";

/// The folder of a step's checkpoint.
inline std::string step_folder(const std::string& root, std::int64_t step) {
  char name[40];
  std::snprintf(name, sizeof name, "/step-%09lld", static_cast<long long>(step));
  return root + name;
}

/// The steps of whole checkpoints, ascending. Errors of all here: checkpoint_error K07.
inline std::vector<std::int64_t> steps(const std::string& root) {
  std::vector<std::int64_t> found;
  for (const std::string& name : names_in(root)) {
    std::int64_t step = 0;
    if (!name.starts_with("step-")) continue;
    const auto [end, failure] = std::from_chars(name.data() + 5, name.data() + name.size(), step);
    if (failure == std::errc{} && end == name.data() + name.size()) found.push_back(step);
  }
  std::sort(found.begin(), found.end());
  return found;
}
/// The newest of them.
inline std::optional<std::int64_t> latest(const std::string& root) {
  const std::vector<std::int64_t> all = steps(root);
  return all.empty() ? std::nullopt : std::optional(all.back());
}

/// Removes what killed runs left: one rank calls before any saves.
inline void clean(const std::string& root) {
  for (const std::string& name : names_in(root)) {
    const bool left =
        name.starts_with("step-") && (name.find(unfinished_mark) != std::string::npos || name.ends_with(removed_mark));
    if (left) remove_folder(path_in(root, name));
  }
}
/// Removes all checkpoints but the newest `keep`; one that is removed partly is none any more.
inline void prune(const std::string& root, int keep) {
  const std::vector<std::int64_t> all = steps(root);
  for (std::size_t i = 0; i + static_cast<std::size_t>(std::max(keep, 0)) < all.size(); ++i) {
    const std::string folder = step_folder(root, all[i]);
    rename(folder, folder + removed_mark);
    remove_folder(folder + removed_mark);
  }
}

}  // namespace pleat::inline v0::checkpoint
