// The main of a program of cases on two GPUs: ranks as threads and as processes, with many and with one hardware queue,
// each way in a process of its own. Threads may share one GPU if its streams have hardware queues of their own: streams
// that wait for each other must not stand in one. Exit code 77 where there is no GPU; what hangs ends with a message.
#pragma once

#include <gpu/two_gpus.cuh>
#include <support/watchdog.hpp>

#include <cstdio>
#include <cstdlib>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <sys/wait.h>

namespace two_gpus {

struct Way {
  const char* name;
  bool is_processes;
  bool has_one_connection = false;
  bool loads_lazily = false;

  bool may_share_gpu() const { return !is_processes && !has_one_connection; }
};
inline constexpr Way all_ways[] = {
    {"threads", false},
    {"processes", true},
    {"threads, one connection", false, true},
    {"processes, one connection", true, true},
};

/// In a way whose streams share one hardware queue.
inline bool has_one_connection() {
  const char* const connections = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  return connections != nullptr && std::string_view(connections) == "1";
}

/// A case returns what its line of the table says, and throws when something is wrong.
struct Case {
  const char* name;
  std::string (*run)(Rank&);
};

inline void run_rank(Link& link, int rank, const Way& way, std::span<const Case> cases) {
  const auto end_process = [rank](const std::string& text) {
    std::fprintf(stderr, "rank %d: %s\n", rank, text.c_str());
    std::_Exit(1);
  };
  const char* name = "setup";
  try {
    constexpr auto limit = 60s;  // other programs may use the GPUs
    std::optional<testing_support::Watchdog> watchdog(std::in_place, name, limit, end_process);
    Rank site(link, rank);
    for (const Case& one : cases) {
      name = one.name;
      watchdog.emplace(name, limit, end_process);
      link.meet();
      const std::string result = one.run(site);
      link.meet();  // both are right
      if (rank == 0) std::printf("%-26s %-28s %s\n", way.name, one.name, result.c_str());
    }
  } catch (const std::exception& e) {
    end_process(std::string(name) + ": " + e.what());
  }
}

/// In a process that has made no call of CUDA.
inline int run_way(const Way& way, std::span<const Case> cases) {
  // The kernels of a test are not preloaded: one that is loaded at its first launch may wait for the device, and so for
  // a peer.
  setenv("CUDA_MODULE_LOADING", way.loads_lazily ? "LAZY" : "EAGER", 1);
  if (way.may_share_gpu() || way.has_one_connection) {
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", way.has_one_connection ? "1" : "32", 1);
  } else {
    unsetenv("CUDA_DEVICE_MAX_CONNECTIONS");
  }
  if (!way.is_processes) {
    if (pleat::cuda_device_count() < (way.may_share_gpu() ? 1 : ranks)) return 77;
    ThreadPair pair;
    std::vector<std::jthread> threads;
    for (int r = 0; r < ranks; ++r) {
      threads.emplace_back([&, r] {
        ThreadLink link(pair);
        run_rank(link, r, way, cases);
      });
    }
    return 0;
  }
  int sockets[2];
  require(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0, "socketpair failed");
  const pid_t child = fork();
  require(child >= 0, "fork failed");
  const int rank = child == 0 ? 1 : 0;
  close(sockets[1 - rank]);
  if (pleat::cuda_device_count() < ranks) return 77;
  ProcessLink link(sockets[rank]);
  run_rank(link, rank, way, cases);
  if (child == 0) return 0;
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

/// The exit code of the program. `only`: the name of the way that is wanted; null: all.
inline int run_all(std::span<const Case> cases, std::span<const Way> ways = all_ways, const char* only = nullptr) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  int worst = 0, ran = 0;
  for (const Way& way : ways) {
    if (only != nullptr && std::string_view(only) != way.name) continue;
    const pid_t child = fork();
    require(child >= 0, "fork failed");
    if (child == 0) std::_Exit(run_way(way, cases));
    int status = 0;
    waitpid(child, &status, 0);
    const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 1;
    if (code == 77) {
      std::printf("%-26s skipped: %s\n", way.name, way.may_share_gpu() ? "no GPU" : "fewer than two GPUs");
      continue;
    }
    ++ran;
    if (code != 0) std::printf("%s: exit code %d\n", way.name, code);
    worst = code != 0 ? 1 : worst;
  }
  if (ran == 0) return 77;
  std::printf(worst == 0 ? "all passed\n" : "FAILED\n");
  return worst;
}

}  // namespace two_gpus
