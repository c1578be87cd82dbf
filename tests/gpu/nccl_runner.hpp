// Runs the cases of a test program, each in one process or in a process per rank of the same executable.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <support/repeats.hpp>
#include <support/shared_page.hpp>
#include <support/stacks.hpp>

#include "nccl_ranks.hpp"

extern char** environ;

namespace nccl_testing {

inline constexpr const char* part_mark = "- ";

/// Prints a part of a case, and how long it took. Such lines are shown when the case is good, too.
template <class F>
void timed(const std::string& name, F f) {
  std::printf("%s%s", part_mark, name.c_str());
  const auto start = std::chrono::steady_clock::now();
  try {
    f();
  } catch (...) {
    std::printf("  FAILED\n");
    throw;
  }
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  std::printf("  %.2f s\n", took.count());
}

struct Case {
  std::string name;
  bool is_processes;
  std::function<void()> run;
  int limit_s = 30;
  int killed_rank = -1;        // that dies of SIGKILL when all is well
  bool has_deadlines = false;  // that kernels which a tool has instrumented would miss

  bool is_expected(std::size_t rank, int status) const {
    if (static_cast<int>(rank) != killed_rank) return status == 0;
    return WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
  }
};

/// One case: in this process, or as one rank of it when RANK is set. The exit code.
inline int run_case(const std::vector<Case>& cases, const std::string& name) {
  std::setvbuf(stdout, nullptr, _IONBF, 0);  // what was printed is there when the program is killed
  testing_support::print_stacks_on_abort();
  for (const Case& one : cases) {
    if (one.name != name) continue;
    try {
      one.run();
      return 0;
    } catch (const std::exception& e) {
      std::printf("FAILED: %s\n", e.what());
      return 1;
    }
  }
  std::printf("no case is named %s\n", name.c_str());
  return 2;
}

/// A program of this executable: `rank` of all, or alone when it is negative. Its output goes to a file.
inline pid_t spawn(const char* self, const std::string& name, int rank, int port, const std::string& shared,
                   const std::string& output) {
  std::vector<std::string> texts;
  if (rank >= 0) {
    texts = {"RANK=" + std::to_string(rank),
             "LOCAL_RANK=" + std::to_string(rank),
             "WORLD_SIZE=" + std::to_string(world_ranks),
             "MASTER_ADDR=127.0.0.1",
             "MASTER_PORT=" + std::to_string(port),
             std::string(testing_support::shared_file_variable) + "=" + shared};
  }
  texts.push_back("NCCL_NVLS_ENABLE=0");
  std::vector<char*> environment;
  for (std::string& text : texts) environment.push_back(text.data());
  for (char** i = environ; *i != nullptr; ++i) environment.push_back(*i);
  environment.push_back(nullptr);
  std::string argument = name;
  char flag[] = "--case", *arguments[] = {const_cast<char*>(self), flag, argument.data(), nullptr};
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 1, output.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  posix_spawn_file_actions_adddup2(&actions, 1, 2);
  pid_t id = -1;
  const int status = posix_spawn(&id, self, &actions, nullptr, arguments, environment.data());
  posix_spawn_file_actions_destroy(&actions);
  return status == 0 ? id : -1;
}

/// Waits until all have ended, at most the case's limit. Once one has failed, its peers get two seconds, since they may
/// wait for it in the next part of the case. Who is left says where it is (stacks.hpp). The wait statuses.
inline std::vector<int> wait_for(const Case& one, const std::vector<pid_t>& programs) {
  constexpr int grace_s = 2;
  std::vector<int> statuses(programs.size(), 0);
  std::vector<char> is_running(programs.size(), 1);
  const auto poll_until = [&](std::chrono::steady_clock::time_point end) {
    while (std::find(is_running.begin(), is_running.end(), 1) != is_running.end() &&
           std::chrono::steady_clock::now() < end) {
      for (std::size_t p = 0; p < programs.size(); ++p) {
        if (!is_running[p] || ::waitpid(programs[p], &statuses[p], WNOHANG) == 0) continue;
        is_running[p] = 0;
        if (!one.is_expected(p, statuses[p])) {
          end = std::min(end, std::chrono::steady_clock::now() + std::chrono::seconds(grace_s));
        }
      }
      ::usleep(5000);
    }
  };
  poll_until(std::chrono::steady_clock::now() + std::chrono::seconds(one.limit_s));
  for (const int signal : {SIGABRT, SIGKILL}) {
    for (std::size_t p = 0; p < programs.size(); ++p) {
      if (is_running[p]) ::kill(programs[p], signal);
    }
    poll_until(std::chrono::steady_clock::now() + std::chrono::seconds(grace_s));
  }
  return statuses;
}

inline std::string temporary_file(std::size_t bytes) {
  char path[] = "/tmp/nccl_test_XXXXXX";
  const int file = ::mkstemp(path);
  if (file < 0 || ::ftruncate(file, static_cast<off_t>(bytes)) != 0) throw std::runtime_error("no file in /tmp");
  ::close(file);
  return path;
}
/// The end of a program's output, or its lines about the parts of a case.
inline void print_output(const std::string& path, bool only_parts) {
  std::FILE* file = std::fopen(path.c_str(), "r");
  if (file == nullptr) return;
  std::vector<std::string> lines;
  char line[2000];
  while (std::fgets(line, sizeof line, file) != nullptr) {
    if (!only_parts || std::strncmp(line, part_mark, std::strlen(part_mark)) == 0) lines.emplace_back(line);
  }
  std::fclose(file);
  constexpr std::size_t most_lines = 120;
  for (std::size_t i = lines.size() > most_lines ? lines.size() - most_lines : 0; i < lines.size(); ++i) {
    std::printf("      %s", lines[i].c_str());
  }
}
inline std::string text_of(int status) {
  if (WIFSIGNALED(status)) return std::string("signal ") + std::to_string(WTERMSIG(status));
  return std::string("exit code ") + std::to_string(WEXITSTATUS(status));
}

/// All cases whose names have `part`, each in programs of its own and bounded in time, and a table. The exit code.
inline int run_all(const std::vector<Case>& cases, const char* self, const std::string& part) {
  const char* const first_port = std::getenv("PLEAT_TEST_PORT");  // for runs side by side
  int failed = 0, port = first_port != nullptr ? std::atoi(first_port) : 12000 + static_cast<int>(::getpid() % 10000);
  const auto begin = std::chrono::steady_clock::now();
  const auto since = [](std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  for (const Case& one : cases) {
    if (one.name.find(part) == std::string::npos) continue;
    if (testing_support::is_quick() && one.has_deadlines) continue;
    const auto start = std::chrono::steady_clock::now();
    std::vector<pid_t> programs;
    std::vector<std::string> outputs;
    port += 200;  // a case may use the ports behind its own
    const std::string shared = temporary_file(testing_support::shared_file_bytes);  // zeros
    for (int r = 0; r < (one.is_processes ? world_ranks : 1); ++r) {
      outputs.push_back(temporary_file(0));
      programs.push_back(spawn(self, one.name, one.is_processes ? r : -1, port, shared, outputs.back()));
    }
    const std::vector<int> statuses = wait_for(one, programs);
    ::unlink(shared.c_str());
    bool is_good = true;
    for (std::size_t r = 0; r < statuses.size(); ++r) is_good = is_good && one.is_expected(r, statuses[r]);
    std::printf("%-6s  %-36s  %6.1f s\n", is_good ? "ok" : "FAILED", one.name.c_str(), since(start));
    failed += is_good ? 0 : 1;
    for (std::size_t r = 0; r < outputs.size(); ++r) {
      if (!is_good) std::printf("    rank %zu: %s\n", r, text_of(statuses[r]).c_str());
      if (!is_good || r == 0) print_output(outputs[r], is_good);
      ::unlink(outputs[r].c_str());
    }
    std::fflush(stdout);
  }
  std::printf("%s in %.0f s\n", failed == 0 ? "all passed" : "some FAILED", since(begin));
  return failed == 0 ? 0 : 1;
}

}  // namespace nccl_testing
