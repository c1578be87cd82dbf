// Ranks that are processes of this machine, for tests of what one sees of another's end.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>
#include <csignal>

#include <pleat/comm/job.hpp>
#include <pleat/nccl/rendezvous.hpp>

namespace nccl_testing {

using namespace std::chrono_literals;

/// A port of this machine that was free just now.
inline int free_port() {
  const auto loopback = pleat::detail::resolve("127.0.0.1", 0).front();
  return pleat::detail::port_of(pleat::detail::listen_at(loopback, 0, 1));
}
inline pleat::LauncherEnvironment environment_of(int rank, int size, int port, const std::string& job = "/test") {
  return {"test", rank, size, rank, "127.0.0.1", port, job};
}

/// How a rank's process ended: what it threw, or "returned"; "killed" when a signal ended it.
struct Ending {
  std::string text;
  std::chrono::milliseconds after;
};

/// Runs `f(rank)` in `ranks` processes of their own and waits for them; after 20 s they are killed.
inline std::vector<Ending> run_processes(int ranks, const std::function<void(int)>& f) {
  struct Child {
    pid_t id;
    int pipe;
  };
  std::vector<Child> children;
  const auto start = std::chrono::steady_clock::now();
  for (int rank = 0; rank < ranks; ++rank) {
    int ends[2];
    if (::pipe(ends) != 0) throw std::runtime_error("pipe");
    const pid_t id = ::fork();
    if (id == 0) {
      ::alarm(20);
      std::string text = "returned";
      try {
        f(rank);
      } catch (const std::exception& e) {
        text = e.what();
      }
      (void)!::write(ends[1], text.data(), text.size());
      ::_exit(0);
    }
    ::close(ends[1]);
    children.push_back({id, ends[0]});
  }
  std::vector<Ending> endings(children.size());
  std::vector<char> has_ended(children.size(), 0);
  for (std::size_t left = children.size(); left > 0;) {
    for (std::size_t r = 0; r < children.size(); ++r) {
      int status = 0;
      if (has_ended[r] || ::waitpid(children[r].id, &status, WNOHANG) == 0) continue;
      has_ended[r] = 1;
      --left;
      char buffer[4096];
      ssize_t got = 0;
      while ((got = ::read(children[r].pipe, buffer, sizeof buffer)) > 0) {
        endings[r].text.append(buffer, static_cast<std::size_t>(got));
      }
      ::close(children[r].pipe);
      if (WIFSIGNALED(status)) endings[r].text = WTERMSIG(status) == SIGKILL ? "killed" : "ended by a signal";
      endings[r].after =
          std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - start);
    }
    ::usleep(1000);
  }
  return endings;
}

inline std::vector<int> first_ranks(int count) {
  std::vector<int> ranks;
  for (int r = 0; r < count; ++r) ranks.push_back(r);
  return ranks;
}

/// Runs `f(job)` in processes that have met.
inline std::vector<Ending> run_jobs(int ranks, const std::function<void(pleat::Job&)>& f,
                                    std::chrono::milliseconds deadline = 10s) {
  const int port = free_port();
  return run_processes(ranks, [&](int rank) {
    pleat::Job job(pleat::rendezvous(environment_of(rank, ranks, port), 10s), deadline);
    f(job);
  });
}

}  // namespace nccl_testing
