// Stacks: a test program that is aborted says where each of its threads is, also inside libraries.
#pragma once

#include <csignal>
#include <cstdlib>

#include <dirent.h>
#include <execinfo.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace testing_support {

namespace detail {
inline void print_stack(int) {
  void* frames[40];
  const int count = ::backtrace(frames, 40);
  ::dprintf(STDERR_FILENO, "thread %ld\n", ::syscall(SYS_gettid));
  ::backtrace_symbols_fd(frames, count, STDERR_FILENO);
}
inline void print_stacks(int) {
  std::signal(SIGABRT, SIG_DFL);
  if (DIR* tasks = ::opendir("/proc/self/task")) {
    while (const dirent* task = ::readdir(tasks)) {
      const long id = std::atol(task->d_name);
      if (id == 0) continue;
      ::syscall(SYS_tgkill, ::getpid(), id, SIGUSR1);
      ::usleep(20000);  // so that they do not print at once
    }
    ::closedir(tasks);
  }
  std::abort();
}
}  // namespace detail

/// From now on SIGABRT, sent or raised by std::abort, prints the stacks of all threads before it ends the program. Uses
/// SIGUSR1. Link with -rdynamic for the names of functions of the program itself.
inline void print_stacks_on_abort() {
  void* frame = nullptr;
  (void)::backtrace(&frame, 1);  // loads what it needs outside of a signal
  std::signal(SIGUSR1, detail::print_stack);
  std::signal(SIGABRT, detail::print_stacks);
}

}  // namespace testing_support
