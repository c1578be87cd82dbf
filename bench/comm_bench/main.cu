// comm_bench: what moving bytes between two GPUs costs, for every operation of the library, beside the bare transfers
// and NCCL in the same run. Ranks are threads, then processes.
//
//   comm_bench [--quick] [--mode threads|processes] [--json <file>] [--check]
//
// Exit code 77 where there are fewer than two GPUs; 1 when data is wrong or time is up; 3 with --check when a bar is
// missed.
#include <cstdio>
#include <cstdlib>
#include <string>

#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <pleat/nccl/run_threads.hpp>

#include "bench.cuh"

extern char** environ;

namespace comm_bench {
namespace {

using namespace std::chrono_literals;

struct Options {
  bool quick = false, check = false;
  std::string mode, worker, json;

  std::vector<std::size_t> sizes() const {
    if (quick) return {4 * kib, 64 * kib, mib, 8 * mib, 128 * mib};
    return {4 * kib, 16 * kib, 64 * kib, 256 * kib, mib,       2 * mib,   4 * mib,
            8 * mib, 16 * mib, 32 * mib, 64 * mib,  128 * mib, 512 * mib, 1024 * mib};
  }
};
Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    const bool has_value = i + 1 < argc;
    if (name == "--quick") {
      options.quick = true;
    } else if (name == "--check") {
      options.check = true;
    } else if (name == "--mode" && has_value) {
      options.mode = argv[++i];
    } else if (name == "--worker" && has_value) {
      options.worker = argv[++i];
    } else if (name == "--json" && has_value) {
      options.json = argv[++i];
    } else {
      throw std::runtime_error("unknown option " + name);
    }
  }
  for (const std::string& mode : {options.mode, options.worker}) {
    if (mode != "" && mode != "threads" && mode != "processes") throw std::runtime_error("unknown mode " + mode);
  }
  return options;
}

constexpr auto deadline = 20s;
constexpr int time_limit_s = 120;

/// One rank; the exit code.
int work(pleat::NcclComm& world, pleat::CudaThreadComm* threads, const Options& options) {
  const std::vector<std::size_t> sizes = options.sizes();
  Site site(world, sizes.back(), PeerOperations::window_bytes(sizes.back()));
  PeerOperations peer(site, sizes.back());
  Report report(world.rank() == 0, options.worker, options.json);
  Bench(site, peer, report, threads).run(sizes);
  if (world.rank() == 0) {
    std::printf("\n%s: %d of %d bars hold\n", options.worker.c_str(), report.bars() - report.missed(), report.bars());
  }
  return options.check && report.missed() > 0 ? 3 : 0;
}

int run_worker(const Options& options) {
  if (options.worker == "processes") {
    pleat::NcclComm world = pleat::NcclComm::from_environment({.deadline = deadline});
    return work(world, nullptr, options);
  }
  auto run = std::make_shared<pleat::detail::ThreadWorld>(ranks, deadline);
  auto group = std::make_shared<pleat::CudaThreadComm::group_type>(run, std::vector<int>{0, 1});
  int code = 0;
  pleat::run_nccl_threads(ranks,
                          [&](pleat::NcclComm& world) {
                            pleat::detail::use_device(world.device(), {0, 1});
                            pleat::CudaThreadComm threads(group, world.rank());
                            const int mine = work(world, &threads, options);
                            if (world.rank() == 0) code = mine;
                          },
                          {.deadline = deadline});
  return code;
}

/// This program again, as a worker of `mode`: all ranks when `rank` is negative.
pid_t spawn(const Options& options, const std::string& mode, int rank, int port) {
  std::vector<std::string> words{"comm_bench", "--worker", mode};
  if (options.quick) words.push_back("--quick");
  if (options.check) words.push_back("--check");
  if (!options.json.empty()) words.insert(words.end(), {"--json", options.json});
  std::vector<std::string> variables{"NCCL_NVLS_ENABLE=0", "CUDA_MODULE_LOADING=EAGER"};
  if (rank >= 0) {
    variables.insert(variables.end(), {"RANK=" + std::to_string(rank), "LOCAL_RANK=" + std::to_string(rank),
                                       "WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1", "PLEAT_PORT=" + std::to_string(port)});
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
int wait_for(std::vector<pid_t> workers) {
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

int run_all(const Options& options) {
  if (const int devices = pleat::cuda_device_count(); devices < ranks) {
    std::printf("skipped: %d GPUs, %d are needed\n", devices, ranks);
    return 77;
  }
  if (!options.json.empty()) (void)std::remove(options.json.c_str());
  int worst = 0;
  for (const char* mode : {"threads", "processes"}) {
    if (!options.mode.empty() && options.mode != mode) continue;
    const bool is_processes = std::string(mode) == "processes";
    const int port = 20000 + static_cast<int>(getpid() % 10000);
    std::vector<pid_t> workers;
    for (int rank = 0; rank < (is_processes ? ranks : 1); ++rank) {
      workers.push_back(spawn(options, mode, is_processes ? rank : -1, port));
    }
    worst = std::max(worst, wait_for(workers));
  }
  return worst;
}

}  // namespace
}  // namespace comm_bench

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  try {
    const comm_bench::Options options = comm_bench::parse(argc, argv);
    return options.worker.empty() ? comm_bench::run_all(options) : comm_bench::run_worker(options);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "comm_bench: %s\n", e.what());
    return 1;
  }
}
