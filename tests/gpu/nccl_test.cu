// NcclComm and NcclArena on two GPUs, ranks as threads and as processes. Without arguments: all cases, each in programs
// of its own and bounded in time, and a table. Exit code 77 where there are fewer than two GPUs.
//
//   nccl_test [<part of a case's name>]
//   nccl_test --case <name>     one case: in this process, or as one rank of it when RANK is set
#include <cstdio>
#include <cstring>

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>

#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <conformance/collectives.hpp>
#include <conformance/exchanges.hpp>
#include <conformance/splits.hpp>
#include <conformance/sums.hpp>

#include "nccl_failures.cuh"

extern char** environ;

namespace {

using namespace nccl_testing;
using conformance::require;
using pleat::DType;
using pleat::NcclComm;

TEST_CASE("owned") {
  conformance::check_collectives<NcclThreads, conformance::Whole>();
  conformance::check_exchanges<NcclThreads, conformance::Whole>();
  conformance::check_splits<NcclThreads>();
}
TEST_CASE("handles") {
  conformance::check_collectives<NcclThreads, conformance::Handle>();
  conformance::check_exchanges<NcclThreads, conformance::Handle>();
  conformance::check_sums<NcclThreads>();
}
TEST_CASE("borrowed") {
  conformance::check_collectives<BorrowedNcclThreads, conformance::Whole>();
  conformance::check_exchanges<BorrowedNcclThreads, conformance::Whole>();
  conformance::check_splits<BorrowedNcclThreads>();
}
TEST_CASE("arena") {
  conformance::check_peer_access<NcclThreads>();
}

void run_suite(const char* name) {
  doctest::Context context;
  context.addFilter("test-case", name);
  require(context.run() == 0, "the suite failed");
}

/// All operations of one world, for ranks that share no memory.
void all_operations(NcclComm& world) {
  Site site(world, world);
  unsigned tag = 1;
  for (const DType dtype : conformance::dtypes) {
    for (const std::size_t elems : {0, 1, 129, 70001}) {
      conformance::all_gather_once(site, elems, dtype, tag % 2 == 0, tag);
      conformance::all_to_all_once(site, elems, dtype, ++tag);
      for (int root = 0; root < world.size(); ++root) conformance::broadcast_once(site, elems, root, dtype, ++tag);
    }
    for (int shape = 0; shape < conformance::count_shapes; ++shape) {
      conformance::all_gather_v_once(site, conformance::uneven_counts(world.size(), shape), dtype, shape % 2 == 0,
                                     ++tag);
    }
    conformance::all_to_all_v_once(
        site, [](int from, int to) { return static_cast<std::size_t>((from * 7 + to * 3) % 5); }, dtype, ++tag);
    std::vector<conformance::PlannedMessage> messages;
    for (int from = 0; from < world.size(); ++from) {
      for (int to = 0; to < world.size(); ++to)
        messages.push_back({from, to, static_cast<std::size_t>(from + 2 * to), ++tag});
    }
    conformance::exchange_once(site, messages, dtype, true);
    conformance::exchange_once(site, messages, dtype, true);
  }
  auto reversed = conformance::checked_split(
      site, [](int) { return -5; }, [](int r) { return -r; });
  healthy(reversed);
  auto alone = conformance::checked_split(
      site, [](int r) { return r; }, [](int) { return 0; });
  healthy(alone);
}

/// NCCL's own sums, of integers, so that the order does not show; and all ways to gather unequal parts.
void native_operations(NcclComm& world) {
  Site site(world, world);
  const auto n = static_cast<std::size_t>(world.size());
  constexpr std::size_t elems = 777;
  const auto values = [&](int rank, std::size_t count) {
    conformance::Bytes bytes(count * sizeof(std::int64_t));
    for (std::size_t i = 0; i < count; ++i) {
      const std::int64_t value = (rank + 1) * static_cast<std::int64_t>(i * i + 3);
      std::memcpy(bytes.data() + i * sizeof value, &value, sizeof value);
    }
    return bytes;
  };
  const int ones = world.size() * (world.size() + 1) / 2;  // the sum of rank + 1
  const conformance::Bytes sums = values(ones - 1, elems * n);
  auto buffer = site.upload(values(world.rank(), elems * n));
  world.all_reduce(buffer.block().data, elems * n, DType::i64, site.s());
  conformance::require_equal(site.download(buffer), sums, "all_reduce");
  auto in = site.upload(values(world.rank(), elems * n));
  DeviceBuffer out(elems * sizeof(std::int64_t));
  world.reduce_scatter(in.block().data, out.block().data, elems, DType::i64, site.s());
  const auto first = sums.begin() + static_cast<std::ptrdiff_t>(elems * sizeof(std::int64_t)) * world.rank();
  conformance::require_equal(site.download(out), {first, first + elems * sizeof(std::int64_t)}, "reduce_scatter");

  for (const auto way : {pleat::GatherV::messages, pleat::GatherV::broadcasts}) {
    const auto counts = conformance::uneven_counts(world.size(), 0);
    conformance::Bytes expected;
    for (int r = 0; r < world.size(); ++r) {
      conformance::append(expected, conformance::pattern(counts[static_cast<std::size_t>(r)] * 4, r, 0, 9));
    }
    auto mine =
        site.upload(conformance::pattern(counts[static_cast<std::size_t>(world.rank())] * 4, world.rank(), 0, 9));
    DeviceBuffer all(expected.size());
    world.all_gather_v(mine.block().data, all.block().data, counts, DType::f32, site.s(), way);
    conformance::require_equal(site.download(all), expected, "all_gather_v by way ", static_cast<int>(way));
  }
  conformance::require_throws<pleat::comm_error>(
      [&] { world.broadcast(nullptr, 1, world.size(), DType::f32, site.s()); }, "pleat[C05]");
  conformance::require_throws<pleat::comm_error>(
      [&] { world.all_gather_v(nullptr, nullptr, std::vector<std::size_t>(n + 1), DType::f32, site.s()); },
      "pleat[C05]");
  const pleat::Send send{nullptr, 1, world.size()};
  conformance::require_throws<pleat::comm_error>(
      [&] {
        world.exchange({&send, 1}, {}, DType::f32, site.s());
      },
      "pleat[C06]: exchange with peer");
  healthy(world);  // refusals of one's own arguments end nothing
}

void arena_operations(NcclComm& world) {
  conformance::PeerSite<NcclThreads> site(world);
  {
    auto arena = site.make_arena(1 << 20);
    require(arena.reachable(site.everybody()), "two GPUs of one machine map each other's memory");
    auto peers = arena.open(site.everybody(), conformance::all_write_bytes(site.size()), 2);
    for (unsigned round = 0; round < 20; ++round) {
      conformance::all_write_once(site, peers, static_cast<int>(round) % 2, round);
      site.comm.barrier(site.s());
    }
    for (const int slots : {1, 2, 3}) {
      auto window = arena.open(site.everybody(), static_cast<std::size_t>(slots) * 24, 2);
      conformance::credits_once(site, window, slots, 30);
    }
    site.finish();
  }
  conformance::require_throws<pleat::comm_error>([&] { site.make_arena(std::size_t{1} << 45); }, "pleat[C26]: rank 0");
  auto again = site.make_arena(64);
  auto peers = again.open(site.everybody(), 64, 1);
  site.finish();
}

/// What is refused before NCCL refuses it, or hangs.
void refusals() {
  const auto create = [](int device_of_1, const char* text) {
    auto post = std::make_shared<pleat::detail::ThreadPost>(2);
    std::vector<std::string> texts(2);
    {
      std::vector<std::jthread> threads;
      for (int r = 0; r < 2; ++r) {
        threads.emplace_back([&, r] {
          try {
            (void)NcclComm::create(std::make_unique<pleat::ThreadLink>(post, r), r == 0 ? 0 : device_of_1,
                                   {.deadline = 5s});
          } catch (const pleat::error& e) {
            texts[static_cast<std::size_t>(r)] = e.what();
          }
        });
      }
    }
    for (const std::string& seen : texts) {
      require(seen.find(text) == 0, "a rank saw `", seen, "` instead of ", text);
    }
  };
  create(0, "pleat[C24]: ranks 0 and 1 share a GPU");
  create(999, "pleat[C20]: cudaSetDevice failed");
  ::setenv("NCCL_NVLS_ENABLE", "1", 1);
  create(1, "pleat[C23]: NCCL_NVLS_ENABLE is 1");
  ::unsetenv("NCCL_NVLS_ENABLE");
  create(1, "pleat[C23]: NCCL_NVLS_ENABLE is not set");
  ::setenv("NCCL_NVLS_ENABLE", "0", 1);
  conformance::require_throws<pleat::nccl_error>([] { pleat::check_nccl(ncclInvalidArgument, "ncclSend"); },
                                                 "pleat[C21]: ncclSend failed: invalid argument");
  pleat::run_nccl_threads(2, healthy);
}

/// A borrowed communicator is reported after its deadline, and goes on for its owner.
void borrowed_is_not_aborted() {
  pleat::run_nccl_threads(2, [](NcclComm& world) {
    Site site(world, world);
    healthy(world);
    const auto mine = conformance::pattern(400, world.rank(), 0, 3);
    auto in = site.upload(mine);
    DeviceBuffer out(800);
    {
      NcclComm borrowed = NcclComm::borrow(world.native(), {.deadline = 700ms});
      if (world.rank() == 1) std::this_thread::sleep_for(2s);
      borrowed.all_gather(in.block().data, out.block().data, 100, DType::f32, site.s());
      if (world.rank() == 0) {
        conformance::require_throws<pleat::comm_error>([&] { borrowed.wait(site.s()); },
                                                       "pleat[C04]: rank 0 waited 700 ms");
        conformance::require_throws<pleat::comm_error>([&] { borrowed.barrier(site.s()); }, "pleat[C04]");
      }
    }
    conformance::Bytes expected = conformance::pattern(400, 0, 0, 3);
    conformance::append(expected, conformance::pattern(400, 1, 0, 3));
    conformance::require_equal(site.download(out), expected, "the operation that was given up");
    healthy(world);
  });
}

std::size_t free_bytes() {
  std::size_t least = ~std::size_t{0};
  for (int device = 0; device < 2; ++device) {
    const pleat::CudaDeviceScope scope(device);
    std::size_t free = 0, total = 0;
    pleat::check_cuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    least = std::min(least, free);
  }
  return least;
}

/// Runs `f(world)` on two threads, of which rank 1 fails, and checks what rank 0 and the run saw.
template <class F>
void thread_failure(const char* operation, Way way, F f) {
  std::string seen = "nothing";
  std::chrono::milliseconds took{};
  try {
    pleat::run_nccl_threads(
        2,
        [&](NcclComm& world) {
          const auto start = std::chrono::steady_clock::now();
          try {
            f(world);
          } catch (const std::exception& e) {
            if (world.rank() == 0) {
              seen = e.what();
              took = std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - start);
            }
            throw;
          }
        },
        {.deadline = deadline});
  } catch (const pleat::rank_error& e) {
    require(way == Way::throws && e.rank() == failing_rank, "the run blames rank ", e.rank());
  } catch (const pleat::comm_error&) {
    require(way != Way::throws, "the run does not hold what rank 1 threw");
  }
  require_outcome(seen, operation, way, took);
}

void thread_failures() {
  pleat::run_nccl_threads(2, all_operations);  // loads all kernels, which takes memory for good
  std::size_t before = 0, runs = 0;
  for (const bool is_warm : {true, false}) {
    for (const Way way : {Way::throws, Way::returns, Way::hangs}) {
      for (const Waiting& waiting : waitings()) {
        std::printf("%s: rank 1 %s%s\n", waiting.name, name_of(way), is_warm ? "" : ", nothing connected");
        thread_failure(waiting.name, way,
                       [&](NcclComm& world) { operation_with_failure(world, waiting, way, is_warm); });
        if (before == 0) before = free_bytes();
        ++runs;
      }
    }
  }
  pleat::run_nccl_threads(2, healthy);
  const std::size_t after = free_bytes(), lost = before > after ? before - after : 0;
  std::printf("after %zu failures %zu MiB less are free\n", runs, lost >> 20);
  require(lost < (std::size_t{64} << 20), "failures leave ", lost >> 20, " MiB behind");
}
void thread_signal_failures() {
  for (const bool is_warm : {true, false}) {
    for (const Way way : {Way::throws, Way::returns, Way::hangs}) {
      std::printf("a signal: rank 1 %s%s\n", name_of(way), is_warm ? "" : ", before the first");
      thread_failure("", way, [&](NcclComm& world) { signal_with_failure(world, way, is_warm); });
    }
  }
  pleat::run_nccl_threads(2, arena_operations);
}

/// In this rank's process: a world of its own on the `i`-th port.
NcclComm world_at(int i) {
  auto environment = pleat::LauncherEnvironment::from_process();
  environment.port += i;
  return NcclComm::create(pleat::rendezvous(environment, 30s), environment.local_rank, {.deadline = deadline});
}
template <class F>
void process_failure(int i, const char* operation, Way way, F f) {
  std::printf("%s: rank 1 %s\n", *operation != 0 ? operation : "a signal", name_of(way));
  std::fflush(stdout);
  std::string seen = "nothing";
  int rank = 0;
  std::chrono::milliseconds took{};
  try {
    NcclComm world = world_at(i);
    rank = world.rank();
    const auto start = std::chrono::steady_clock::now();
    try {
      f(world);
    } catch (const std::exception& e) {
      took = std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - start);
      world.abandon(e.what());
      throw;
    }
  } catch (const std::exception& e) {
    seen = e.what();
  }
  if (rank == 0) require_outcome(seen, operation, way, took);
}
void process_failures() {
  int i = 0;
  for (const bool is_warm : {true, false}) {
    for (const Way way : {Way::throws, Way::returns, Way::hangs}) {
      for (const Waiting& waiting : waitings()) {
        process_failure(++i, waiting.name, way,
                        [&](NcclComm& world) { operation_with_failure(world, waiting, way, is_warm); });
      }
      process_failure(++i, "", way, [&](NcclComm& world) { signal_with_failure(world, way, is_warm); });
    }
  }
  NcclComm world = world_at(++i);
  healthy(world);
}
/// Rank 0 survives; the launcher expects rank 1 to be killed.
void process_killed(const std::string& operation) {
  for (const Waiting& waiting : waitings()) {
    if (operation != waiting.name) continue;
    process_failure(0, waiting.name, Way::is_killed,
                    [&](NcclComm& world) { operation_with_failure(world, waiting, Way::is_killed, true); });
  }
  if (operation == "a signal") {
    process_failure(0, "", Way::is_killed, [](NcclComm& world) { signal_with_failure(world, Way::is_killed, true); });
  }
}
/// NcclComm's destructor is what tells the others.
void process_unwinds() {
  const bool is_failing = pleat::LauncherEnvironment::from_process().rank == failing_rank;
  std::string seen = "nothing";
  try {
    NcclComm world = NcclComm::from_environment({.deadline = 20s});
    healthy(world);
    if (is_failing) throw conformance::Boom("boom 17");
    healthy(world);
  } catch (const std::exception& e) {
    seen = e.what();
  }
  if (is_failing) return require(seen == "boom 17", "rank 1 saw `", seen, "`");
  require(seen.find("pleat[C02]: rank 1 failed after") == 0, "rank 0 saw `", seen, "`");
}

struct Case {
  std::string name;
  bool is_processes;
  std::function<void()> run;
  int limit_s = 120;
  bool kills_rank_1 = false;
};
std::vector<Case> cases() {
  const auto in_threads = [](void (*f)(NcclComm&)) {
    return [f] { pleat::run_nccl_threads(2, f, {.deadline = 20s}); };
  };
  const auto in_processes = [](void (*f)(NcclComm&)) {
    return [f] {
      NcclComm world = NcclComm::from_environment({.deadline = 20s});
      f(world);
    };
  };
  std::vector<Case> all{
      {"threads: suite, owned", false, [] { run_suite("owned"); }, 240},
      {"threads: suite, handles", false, [] { run_suite("handles"); }, 240},
      {"threads: suite, borrowed", false, [] { run_suite("borrowed"); }, 240},
      {"threads: suite, arena", false, [] { run_suite("arena"); }, 240},
      {"threads: native operations", false, in_threads(native_operations)},
      {"threads: arena operations", false, in_threads(arena_operations)},
      {"threads: refusals", false, refusals},
      {"threads: borrowed, given up", false, borrowed_is_not_aborted},
      {"threads: failures", false, thread_failures, 300},
      {"threads: failures, signals", false, thread_signal_failures, 120},
      {"processes: all operations", true, in_processes(all_operations)},
      {"processes: native operations", true, in_processes(native_operations)},
      {"processes: arena operations", true, in_processes(arena_operations)},
      {"processes: failures", true, process_failures, 300},
      {"processes: an exception unwinds", true, process_unwinds},
  };
  std::vector<std::string> operations{"a signal"};
  for (const Waiting& waiting : waitings()) operations.push_back(waiting.name);
  for (const std::string& operation : operations) {
    all.push_back({"processes: killed in " + operation, true, [operation] { process_killed(operation); }, 60, true});
  }
  all.push_back({"processes: healthy after all", true, in_processes(healthy)});
  return all;
}

int run_case(const std::string& name) {
  for (const Case& one : cases()) {
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

/// A program of this executable: `rank` of two, or alone when it is negative. Its output goes to a file.
pid_t spawn(const char* self, const std::string& name, int rank, int port, const std::string& output) {
  std::vector<std::string> texts;
  if (rank >= 0) {
    texts = {"RANK=" + std::to_string(rank), "LOCAL_RANK=" + std::to_string(rank), "WORLD_SIZE=2",
             "MASTER_ADDR=127.0.0.1", "MASTER_PORT=" + std::to_string(port)};
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

/// Waits until all have ended, at most `limit_s`; kills who is left. The wait statuses, -1 for the killed.
std::vector<int> wait_for(const std::vector<pid_t>& programs, int limit_s) {
  std::vector<int> statuses(programs.size(), -1);
  std::size_t left = programs.size();
  std::vector<char> has_ended(programs.size(), 0);
  for (int i = 0; i < limit_s * 100 && left > 0; ++i) {
    for (std::size_t p = 0; p < programs.size(); ++p) {
      if (has_ended[p] || ::waitpid(programs[p], &statuses[p], WNOHANG) <= 0) continue;
      has_ended[p] = 1;
      --left;
    }
    if (left > 0) ::usleep(10000);
  }
  for (std::size_t p = 0; p < programs.size(); ++p) {
    if (has_ended[p]) continue;
    ::kill(programs[p], SIGKILL);
    (void)::waitpid(programs[p], nullptr, 0);
    statuses[p] = -1;
  }
  return statuses;
}

void print_file(const std::string& path) {
  std::FILE* file = std::fopen(path.c_str(), "r");
  if (file == nullptr) return;
  std::vector<std::string> lines;
  char line[2000];
  while (std::fgets(line, sizeof line, file) != nullptr) lines.emplace_back(line);
  std::fclose(file);
  for (std::size_t i = lines.size() > 25 ? lines.size() - 25 : 0; i < lines.size(); ++i) {
    std::printf("      %s", lines[i].c_str());
  }
}

int run_all(const char* self, const std::string& part) {
  int failed = 0, port = 12000 + static_cast<int>(::getpid() % 10000);
  for (const Case& one : cases()) {
    if (one.name.find(part) == std::string::npos) continue;
    const auto start = std::chrono::steady_clock::now();
    std::vector<pid_t> programs;
    std::vector<std::string> outputs;
    port += 100;  // a case may use the ports behind its own
    for (int r = 0; r < (one.is_processes ? 2 : 1); ++r) {
      char path[] = "/tmp/nccl_test_XXXXXX";
      ::close(::mkstemp(path));
      outputs.emplace_back(path);
      programs.push_back(spawn(self, one.name, one.is_processes ? r : -1, port, outputs.back()));
    }
    const std::vector<int> statuses = wait_for(programs, one.limit_s);
    bool is_good = true;
    for (std::size_t r = 0; r < statuses.size(); ++r) {
      const bool was_killed = WIFSIGNALED(statuses[r]) && WTERMSIG(statuses[r]) == SIGKILL;
      is_good = is_good && (one.kills_rank_1 && r == failing_rank ? statuses[r] != -1 && was_killed : statuses[r] == 0);
    }
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    std::printf("%-6s  %-36s  %6.1f s\n", is_good ? "ok" : "FAILED", one.name.c_str(), took.count());
    failed += is_good ? 0 : 1;
    for (std::size_t r = 0; r < outputs.size(); ++r) {
      if (!is_good)
        std::printf("    rank %zu, status %d%s\n", r, statuses[r], statuses[r] == -1 ? " (out of time)" : "");
      if (!is_good) print_file(outputs[r]);
      ::unlink(outputs[r].c_str());
    }
    std::fflush(stdout);
  }
  std::printf("%s\n", failed == 0 ? "all passed" : "some FAILED");
  return failed == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 3 && std::strcmp(argv[1], "--case") == 0) return run_case(argv[2]);
  const int devices = pleat::cuda_device_count();
  if (devices < 2) {
    std::printf("skipped: %d GPUs, 2 are needed\n", devices);
    return 77;
  }
  return run_all("/proc/self/exe", argc > 1 ? argv[1] : "");
}
