// Saving: a snapshot in the order of a stream, files written by any thread, and one rename that makes them a
// checkpoint.
#pragma once

#include <array>
#include <chrono>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <pleat/checkpoint/folder.hpp>
#include <pleat/checkpoint/index.hpp>
#include <pleat/checkpoint/memory.hpp>
#include <pleat/core/block.hpp>
#include <pleat/core/executor.hpp>
#include <pleat/core/footprint.hpp>

namespace pleat::inline v0::checkpoint {

/// Saves a model on one rank. No thread, no communication: ranks meet in the folder `root`, which all of them see.
///
///     const Saver saver(model, mesh, rank, root, run);       // every rank; once
///     saver.snapshot(memory, host, executor, s);             // every rank, between steps: only enqueues
///     // once the copies are done, on any thread, beside the next steps:
///     saver.write(step, host);                               // every rank
///     if (rank == 0) saver.commit(step, {{"position", p}}, deadline_s);
///
/// What is under `root/step-<step>` is whole at every moment, since a rename makes it; a process that is killed leaves
/// at most a folder `*.unfinished-<run>`, which `clean` removes. Calls of one saver may run at the same time for
/// different steps.
class Saver {
 public:
  /// `run`: a plain text that is the same on every rank and new in each start of the job, such as its id and the time
  /// of rank 0, so that files of a killed run are never taken for this one's.
  /// Errors: checkpoint_error K06 when `run` is no plain name, K08, both on every rank.
  Saver(Model model, const RuntimeMesh& mesh, int rank, std::string root, std::string run)
      : model_(std::move(model)), mesh_(mesh), root_(std::move(root)), run_(std::move(run)) {
    check_plain_name(run_, "the run");
    const std::map<std::string, int> savers = saving_stages(model_, mesh_);
    if (std::optional<FilePlan> file = plan_file(model_, mesh_, rank, savers)) {
      file_ = std::move(*file);
      join_copies();
    }
  }

  /// Host memory of a snapshot; 0 on ranks that do not save. Pinned, for copies from a GPU to be asynchronous.
  Footprint footprint() const { return {.pinned_host = static_cast<std::size_t>(file_.data_bytes())}; }

  /// Copies what this rank saves to `host`, in the order of `s`: masters and states must not change before `s` is
  /// here, `host` not before `write`. `memory`: of the units of this rank's stage. Local. Errors: checkpoint_error K10.
  template <executor Executor>
  void snapshot(std::span<const UnitMemory> memory, Block host, const Executor& executor,
                typename Executor::stream_type s) const {
    check_host(host);
    for (const Copy& copy : copies_) {
      executor.copy(host.data + copy.to_bytes, array_of(memory, copy.unit, copy.array) + copy.from_bytes, copy.bytes,
                    s);
    }
  }

  /// Writes this rank's file, synced. `host`: a snapshot whose copies are done. Blocking; any thread.
  /// Errors: checkpoint_error K07 of the system, K10, K11 when there is such a checkpoint.
  void write(std::int64_t step, Block host) const {
    check_host(host);
    if (file_.name.empty()) return;
    const std::string folder = unfinished(step);
    check_new(step);
    make_folder(root_);
    make_folder(folder);
    write_whole(folder, file_.name,
                std::array{std::string_view(file_.header),
                           std::string_view(reinterpret_cast<const char*>(host.data), file_.data_bytes())});
  }

  /// Waits until every rank has written its file of `step`, writes the index and makes it a checkpoint. One rank
  /// calls. Blocking; any thread. `values`: 0 or more; what a resumed run needs beside tensors.
  /// Errors: checkpoint_error K07, K11, K12 when a file does not come in `deadline_s` seconds.
  void commit(std::int64_t step, const std::map<std::string, std::int64_t>& values, double deadline_s = 600) const {
    const std::string folder = unfinished(step);
    check_new(step);
    Catalog catalog = plan_catalog(model_, mesh_);
    catalog.values = values;
    catalog.values["step"] = step;
    for (const CatalogFile& file : catalog.files) {
      wait_for(path_in(folder, file.name), static_cast<std::int64_t>(file.size_bytes), deadline_s);
    }
    const std::string index = make_index(catalog);
    write_whole(folder, index_name, std::array{std::string_view(index)});
    rename(folder, step_folder(root_, step));
    File::folder(root_).sync();
  }

 private:
  struct Copy {
    int unit, array;
    std::uint64_t from_bytes, to_bytes, bytes;
  };

  std::string unfinished(std::int64_t step) const { return step_folder(root_, step) + unfinished_mark + run_; }
  void check_new(std::int64_t step) const {
    if (exists(step_folder(root_, step))) {
      fail<checkpoint_error>("pleat[K11]: there is a checkpoint ", step_folder(root_, step),
                             "; remove it first, or save to another folder");
    }
  }
  void check_host(const Block& host) const {
    if (host.size_bytes < footprint().pinned_host) {
      fail<checkpoint_error>("pleat[K10]: a block of ", host.size_bytes, " bytes for a snapshot of ",
                             footprint().pinned_host, "; allocate what footprint() says");
    }
  }
  /// Neighbours in memory that are neighbours in the file are one copy.
  void join_copies() {
    for (const auto& [piece, offset_bytes] : file_.pieces) {
      const std::uint64_t width = size_bytes(piece.dtype), bytes = static_cast<std::uint64_t>(piece.elems) * width;
      const std::uint64_t from = static_cast<std::uint64_t>(piece.at) * width, to = offset_bytes - file_.header.size();
      if (!copies_.empty()) {
        Copy& last = copies_.back();
        if (last.unit == piece.unit && last.array == piece.array && last.from_bytes + last.bytes == from) {
          last.bytes += bytes;
          continue;
        }
      }
      copies_.push_back({piece.unit, piece.array, from, to, bytes});
    }
  }
  static void wait_for(const std::string& path, std::int64_t bytes, double& left_s) {
    constexpr double pause_s = 0.002;
    for (; size_of_file(path) != bytes; left_s -= pause_s) {
      if (left_s <= 0) {
        fail<checkpoint_error>("pleat[K12]: ", path,
                               " did not come before the deadline; its rank failed, or ranks "
                               "differ in root, run or model");
      }
      std::this_thread::sleep_for(std::chrono::duration<double>(pause_s));
    }
  }

  Model model_;
  RuntimeMesh mesh_;
  std::string root_, run_;
  FilePlan file_;
  std::vector<Copy> copies_;
};

}  // namespace pleat::inline v0::checkpoint
