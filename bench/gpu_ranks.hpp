// A benchmark of several GPUs, a rank on each, runs itself again as workers: all ranks as threads of one, then each as
// a process.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <pleat/cuda/thread_comm.hpp>
#include <pleat/nccl/run_threads.hpp>

extern char** environ;

namespace gpu_ranks {

using namespace std::chrono_literals;

inline constexpr auto deadline = 20s;
inline constexpr int time_limit_s = 120;

/// [--ranks <number>] [--quick] [--mode threads|processes] [--json <file>] [--check], and options with a value that the
/// benchmark names.
struct Options {
  int ranks = 2;
  bool quick = false, check = false;
  std::string mode, worker, json;
  std::map<std::string, std::string> values;

  std::string value(const std::string& name, const std::string& otherwise = {}) const {
    const auto found = values.find(name);
    return found == values.end() ? otherwise : found->second;
  }
};
inline Options parse(int argc, char** argv, const std::vector<std::string>& value_names) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const bool has_value = i + 1 < argc;
    if (name == "--quick") {
      options.quick = true;
    } else if (name == "--check") {
      options.check = true;
    } else if (name == "--ranks" && has_value) {
      options.ranks = std::stoi(argv[++i]);
    } else if (name == "--mode" && has_value) {
      options.mode = argv[++i];
    } else if (name == "--worker" && has_value) {
      options.worker = argv[++i];
    } else if (name == "--json" && has_value) {
      options.json = argv[++i];
    } else if (has_value && std::find(value_names.begin(), value_names.end(), name) != value_names.end()) {
      options.values[name] = argv[++i];
    } else {
      throw std::runtime_error("unknown option " + name);
    }
  }
  if (options.ranks < 1) throw std::runtime_error("--ranks " + std::to_string(options.ranks) + " is not positive");
  for (const std::string& mode : {options.mode, options.worker}) {
    if (mode != "" && mode != "threads" && mode != "processes") throw std::runtime_error("unknown mode " + mode);
  }
  return options;
}

/// One rank's work; returns the exit code. `threads`: null where ranks are processes.
using Work = std::function<int(pleat::NcclComm& world, pleat::CudaThreadComm* threads, const Options& options)>;

inline int run_worker(const Options& options, const Work& work) {
  if (options.worker == "processes") {
    pleat::NcclComm world = pleat::NcclComm::from_environment({.deadline = deadline});
    return work(world, nullptr, options);
  }
  std::vector<int> everybody(static_cast<std::size_t>(options.ranks));
  std::iota(everybody.begin(), everybody.end(), 0);
  auto run = std::make_shared<pleat::detail::ThreadWorld>(options.ranks, deadline);
  auto group = std::make_shared<pleat::CudaThreadComm::group_type>(run, everybody);
  int code = 0;
  pleat::map_memory_between(everybody);
  pleat::run_nccl_threads(options.ranks,
                          [&](pleat::NcclComm& world) {
                            pleat::CudaThreadComm threads(group, world.rank());
                            const int mine = work(world, &threads, options);
                            if (world.rank() == 0) code = mine;
                          },
                          {.deadline = deadline});
  return code;
}

/// This program again, as a worker of `mode`: all ranks when `rank` is negative.
inline pid_t spawn(const Options& options, const std::string& mode, int rank, int port) {
  std::vector<std::string> words{"worker", "--worker", mode, "--ranks", std::to_string(options.ranks)};
  if (options.quick) words.push_back("--quick");
  if (options.check) words.push_back("--check");
  if (!options.json.empty()) words.insert(words.end(), {"--json", options.json});
  for (const auto& [name, value] : options.values) words.insert(words.end(), {name, value});
  std::vector<std::string> variables{"NCCL_NVLS_ENABLE=0"};
  if (std::getenv("CUDA_MODULE_LOADING") == nullptr) variables.emplace_back("CUDA_MODULE_LOADING=EAGER");
  if (rank >= 0) {
    variables.insert(variables.end(), {"RANK=" + std::to_string(rank), "LOCAL_RANK=" + std::to_string(rank),
                                       "WORLD_SIZE=" + std::to_string(options.ranks), "MASTER_ADDR=127.0.0.1",
                                       "PLEAT_PORT=" + std::to_string(port)});
  }
  for (char** i = environ; *i != nullptr; ++i) variables.emplace_back(*i);
  const auto pointers = [](std::vector<std::string>& texts) {
    std::vector<char*> result;
    for (std::string& text : texts) result.push_back(text.data());
    result.push_back(nullptr);
    return result;
  };
  pid_t id = -1;
  if (posix_spawn(&id, "/proc/self/exe", nullptr, nullptr, pointers(words).data(), pointers(variables).data()) != 0) {
    throw std::runtime_error("cannot start a worker");
  }
  return id;
}

/// The worst exit code of the workers; those that are not done in time are killed.
inline int wait_for(std::vector<pid_t> workers) {
  int worst = 0;
  for (int i = 0; i < time_limit_s * 100 && !workers.empty(); ++i) {
    std::erase_if(workers, [&](pid_t worker) {
      int status = 0;
      if (waitpid(worker, &status, WNOHANG) <= 0) return false;
      worst = std::max(worst, WIFEXITED(status) ? WEXITSTATUS(status) : 1);
      return true;
    });
    if (!workers.empty()) usleep(10000);
  }
  for (const pid_t worker : workers) {
    std::printf("out of time: a worker is killed after %d s\n", time_limit_s);
    kill(worker, SIGKILL);
    waitpid(worker, nullptr, 0);
    worst = 1;
  }
  return worst;
}

inline int run_all(const Options& options) {
  if (const int devices = pleat::cuda_device_count(); devices < options.ranks) {
    std::printf("skipped: %d GPUs, %d are needed\n", devices, options.ranks);
    return 77;
  }
  if (!options.json.empty()) (void)std::remove(options.json.c_str());
  int worst = 0;
  for (const char* mode : {"threads", "processes"}) {
    if (!options.mode.empty() && options.mode != mode) continue;
    const bool is_processes = std::string(mode) == "processes";
    const int port = 20000 + static_cast<int>(getpid() % 10000);
    std::vector<pid_t> workers;
    for (int rank = 0; rank < (is_processes ? options.ranks : 1); ++rank) {
      workers.push_back(spawn(options, mode, is_processes ? rank : -1, port));
    }
    worst = std::max(worst, wait_for(workers));
  }
  return worst;
}

/// What main returns: 77 where there are fewer GPUs than ranks; 1 when something fails or time is up; else the worst of
/// the workers' codes.
inline int run(const char* name, int argc, char** argv, const std::vector<std::string>& value_names, const Work& work) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  try {
    const Options options = parse(argc, argv, value_names);
    return options.worker.empty() ? run_all(options) : run_worker(options, work);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s: %s\n", name, e.what());
    return 1;
  }
}

}  // namespace gpu_ranks
