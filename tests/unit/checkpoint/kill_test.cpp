// Killed at any moment, a run that saves leaves its last whole checkpoint.
#include <doctest/doctest.h>

#include <signal.h>
#include <sys/wait.h>

#include <chrono>
#include <cstdlib>
#include <random>

#include "support/repeats.hpp"
#include "unit/checkpoint/sample_model.hpp"

using namespace checkpoint_testing;

namespace {
const RuntimeMesh mesh(MeshDegrees{2, 2, 1, 2, 1});

/// Saves step after step, says which are checkpoints, and removes old ones; until it is killed.
[[noreturn]] void save_for_ever(const std::string& root, const std::string& run, std::int64_t step, int said) {
  checkpoint::clean(root);
  for (;; ++step) {
    save_sample(root, mesh, step, run);
    if (::write(said, &step, sizeof step) != sizeof step) ::_exit(1);
    checkpoint::prune(root, 2);
  }
}
}  // namespace

TEST_CASE("kill -9 at random moments") {
  const char* const asked = std::getenv("PLEAT_TEST_KILLS");
  const int kills = asked == nullptr ? testing_support::repeats(30) : std::atoi(asked);
  const TemporaryFolder root;
  std::mt19937 random(std::random_device{}());
  // A run lives as long as up to three saves: what one takes here, under sanitizers too.
  const auto start = std::chrono::steady_clock::now();
  save_sample(TemporaryFolder(), mesh, 1);
  const auto took = std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - start);
  std::int64_t last = 0;
  int unfinished = 0;
  for (int kill = 0; kill < kills; ++kill) {
    int pipe[2];
    REQUIRE(::pipe(pipe) == 0);
    const ::pid_t child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      try {
        save_for_ever(root, "run" + std::to_string(kill), last + 1, pipe[1]);
      } catch (const std::exception& e) {
        std::fprintf(stderr, "%s\n", e.what());
      }
      ::_exit(2);
    }
    ::close(pipe[1]);
    ::usleep(std::uniform_int_distribution(0u, 3 * static_cast<unsigned>(took.count()))(random));
    REQUIRE(::kill(child, SIGKILL) == 0);
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    CHECK(WIFSIGNALED(status));

    std::int64_t said = last, step = 0;
    while (::read(pipe[0], &step, sizeof step) == sizeof step) said = step;
    ::close(pipe[0]);
    last = checkpoint::latest(root).value_or(0);
    CHECK(last >= said);
    CHECK(last <= said + 1);
    for (const std::string& name : checkpoint::names_in(root)) {
      unfinished += name.find(checkpoint::unfinished_mark) != std::string::npos;
    }
    // Every one that looks whole is.
    for (const std::int64_t whole : checkpoint::steps(root)) {
      const std::string folder = checkpoint::step_folder(root, whole);
      for (int rank = 0; rank < mesh.world_size; ++rank) CHECK(load_sample(folder, mesh, rank, whole) == 0);
    }
  }
  MESSAGE(kills, " kills, ", unfinished, " unfinished saves left behind, ", last, " checkpoints made");
  CHECK(last > 0);
}
