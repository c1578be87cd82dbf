// NcclComm and NcclArena on two GPUs, ranks as threads and as processes. Without arguments: all cases, each in programs
// of its own and bounded in time, and a table. Where there is one GPU, the suites on one rank. Exit code 77 without
// any.
//
//   nccl_test [<part of a case's name>]     PLEAT_TEST_PART, PLEAT_TEST_OPERATION: parts of the suites of failures
//   nccl_test --case <name>     one case: in this process, or as one rank of it when RANK is set
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>

#define DOCTEST_CONFIG_IMPLEMENT
#define DOCTEST_CONFIG_NO_POSIX_SIGNALS  // stacks.hpp takes SIGABRT
#include <doctest/doctest.h>

#include <conformance/collectives.hpp>
#include <conformance/exchanges.hpp>
#include <conformance/splits.hpp>
#include <conformance/sums.hpp>

#include <pleat/nccl/run_process.hpp>

#include "nccl_failures.cuh"
#include "nccl_runner.hpp"
#include "skip.hpp"
#include "two_gpus.cuh"

namespace {

using namespace nccl_testing;
using conformance::require;
using pleat::DType;
using pleat::NcclComm;
using pleat::Recv;
using pleat::Send;

// The suites. Ranks are threads, or processes that each run this program's case.
TEST_CASE("owned") {
  conformance::check_collectives<NcclRanks, conformance::Whole>();
  conformance::check_exchanges<NcclRanks, conformance::Whole>();
  conformance::check_splits<NcclRanks>();
}
TEST_CASE("handles") {
  conformance::check_collectives<NcclRanks, conformance::Handle>();
  conformance::check_exchanges<NcclRanks, conformance::Handle>();
  conformance::check_sums<NcclRanks>();
}
TEST_CASE("borrowed") {
  conformance::check_collectives<BorrowedNcclRanks, conformance::Whole>();
  conformance::check_exchanges<BorrowedNcclRanks, conformance::Whole>();
  conformance::check_splits<BorrowedNcclRanks>();
}
TEST_CASE("arena") {
  conformance::check_peer_access<NcclRanks>();
}
TEST_CASE("failures") {
  conformance::check_failures<NcclRanks>();
}
TEST_CASE("failures of windows") {
  conformance::check_peer_failures<NcclRanks>();
}

void run_suite(const char* name) {
  doctest::Context context;
  context.addFilter("test-case", name);
  const int status = context.run();
  end_world();
  require(status == 0, "the suite failed");
}

/// Each rank lets go of its groups at times of its own, while its peer waits for it in another.
void groups_go_in_any_order(NcclComm& world) {
  Site site(world, world);
  const auto make = [&](int sign) {
    return std::make_unique<NcclComm>(conformance::checked_split(
        site, [](int) { return 0; }, [sign](int r) { return sign * r; }));
  };
  for (int round = 0; round < 3; ++round) {
    std::unique_ptr<NcclComm> groups[] = {make(1), make(-1), make(1)};
    const int first = (world.rank() + round) % 2;
    if (world.rank() == round % 2) groups[first].reset();
    healthy(*groups[2]);
    groups[first].reset();
    world.barrier(site.s());
    site.finish();
    if (world.rank() == round % 2) std::this_thread::sleep_for(50ms);
    groups[1 - first].reset();
    healthy(world);
    healthy(*groups[2]);
  }
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
  NcclRanks::Buffer out(elems * sizeof(std::int64_t));
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
    NcclRanks::Buffer all(expected.size());
    world.all_gather_v(mine.block().data, all.block().data, counts, DType::f32, site.s(), way);
    conformance::require_equal(site.download(all), expected, "all_gather_v by way ", static_cast<int>(way));
  }
  conformance::require_throws<pleat::comm_error>(
      [&] { world.broadcast(nullptr, 1, world.size(), DType::f32, site.s()); }, "pleat[C05]");
  conformance::require_throws<pleat::comm_error>(
      [&] { world.all_gather_v(nullptr, nullptr, std::vector<std::size_t>(n + 1), DType::f32, site.s()); },
      "pleat[C05]");
  const Send send{nullptr, 1, world.size()};
  conformance::require_throws<pleat::comm_error>(
      [&] {
        world.exchange({&send, 1}, {}, DType::f32, site.s());
      },
      "pleat[C06]: exchange with peer");
  healthy(world);  // refusals of one's own arguments end nothing
}

/// Operations in one graph, which is replayed on other data. NCCL has connected before.
void operations_in_a_graph(NcclComm& world) {
  Site site(world, world);
  const int n = world.size(), rank = world.rank(), root = n - 1, next = (rank + 1) % n, last = (rank + n - 1) % n;
  constexpr std::size_t elems = 999, bytes = elems * 4;
  const auto blocks = static_cast<std::size_t>(n);
  const auto counts = conformance::uneven_counts(n, 0);
  std::size_t uneven_bytes = 0;
  for (const std::size_t count : counts) uneven_bytes += 4 * count;
  NcclRanks::Buffer in(blocks * bytes), uneven_in(uneven_bytes), from_root(bytes);
  NcclRanks::Buffer gathered(blocks * bytes), uneven(uneven_bytes), swapped(blocks * bytes), passed(bytes);
  const Send send{in.block().data, elems, next};
  const Recv recv{passed.block().data, elems, last};
  const auto enqueue = [&] {
    world.all_gather(in.block().data, gathered.block().data, elems, DType::f32, site.s());
    world.all_gather_v(uneven_in.block().data, uneven.block().data, counts, DType::f32, site.s());
    world.all_to_all(in.block().data, swapped.block().data, elems, DType::f32, site.s());
    world.broadcast(from_root.block().data, elems, root, DType::f32, site.s());
    world.exchange({&send, 1}, {&recv, 1}, DType::f32, site.s());
    world.barrier(site.s());
  };
  enqueue();
  site.finish();
  const two_gpus::Graph graph(site.s(), enqueue);
  for (unsigned replay = 0; replay < 5; ++replay) {
    const auto block = [replay](int from, int to) { return conformance::pattern(bytes, from, to, replay); };
    const auto part = [&](int from) {
      return conformance::pattern(4 * counts[static_cast<std::size_t>(from)], from, 0, 100 + replay);
    };
    conformance::Bytes mine, of_all, of_all_uneven, to_me;
    for (int r = 0; r < n; ++r) {
      conformance::append(mine, block(rank, r));
      conformance::append(of_all, block(r, 0));
      conformance::append(of_all_uneven, part(r));
      conformance::append(to_me, block(r, rank));
    }
    in.upload(mine.data());
    conformance::Bytes padded = part(rank);
    padded.resize(uneven_bytes);
    uneven_in.upload(padded.data());
    from_root.upload(block(rank, 77).data());
    graph.launch(site.s());
    conformance::require_equal(site.download(gathered), of_all, "replay ", replay, ": all_gather");
    conformance::require_equal(site.download(uneven), of_all_uneven, "replay ", replay, ": all_gather_v");
    conformance::require_equal(site.download(swapped), to_me, "replay ", replay, ": all_to_all");
    conformance::require_equal(site.download(from_root), block(root, 77), "replay ", replay, ": broadcast");
    conformance::require_equal(site.download(passed), block(last, 0), "replay ", replay, ": exchange");
    world.barrier(site.s());  // nobody uploads while a peer's replay still sends
    site.finish();
  }
}

void arena_operations(NcclComm& world) {
  conformance::PeerSite<NcclRanks> site(world);
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
  auto again = site.make_arena(128);
  auto peers = again.open(site.everybody(), 64, 1);
  conformance::require_throws<pleat::comm_error>(
      [&] { (void)again.open(site.everybody(), 0, 1024); },
      "pleat[C08]: the arena has 1024 channels, the operations bound to it so far need 1025; size it by the sum of "
      "footprint().channels");
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
    NcclRanks::Buffer out(800);
    {
      NcclComm borrowed = NcclComm::borrow(world.native(), {.deadline = 300ms});
      if (world.rank() == 1) std::this_thread::sleep_for(1s);
      borrowed.all_gather(in.block().data, out.block().data, 100, DType::f32, site.s());
      if (world.rank() == 0) {
        conformance::require_throws<pleat::comm_error>([&] { borrowed.wait(site.s()); },
                                                       "pleat[C04]: rank 0 waited 300 ms");
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

/// A suite of failures, and what it leaves behind once the first failure has loaded what stays. Where PLEAT_TEST_BESIDE
/// is set, other programs use these GPUs too, so that nobody can tell.
void run_failures(const char* suite, std::size_t most_lost) {
  const auto fail_once = [](NcclComm& world) {
    healthy(world);
    if (world.rank() == 1) throw conformance::Boom("boom 17");
    healthy(world);
  };
  try {
    run_check_anew(fail_once, 20s);
  } catch (const pleat::comm_error&) {
  }
  const std::size_t before = free_bytes();
  run_suite(suite);
  const std::size_t after = free_bytes(), lost = before > after ? before - after : 0;
  std::printf("%s%zu MiB less are free\n", part_mark, lost >> 20);
  if (std::getenv("PLEAT_TEST_BESIDE") == nullptr) {
    require(lost < most_lost, "failures leave ", lost >> 20, " MiB behind");
  }
  run_check(healthy);
  end_world();
}

/// NcclComm's destructor is what tells the others.
void process_unwinds() {
  const bool is_failing = pleat::LauncherEnvironment::from_process().rank == 1;
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

/// The text of what a rank throws reaches the others.
void process_run_throws() {
  const bool is_failing = pleat::LauncherEnvironment::from_process().rank == 1;
  std::string seen = "nothing";
  try {
    pleat::run_nccl_process([&](NcclComm& world) {
      healthy(world);
      if (is_failing) throw conformance::Boom("boom 17");
      healthy(world);
    });
  } catch (const std::exception& e) {
    seen = e.what();
  }
  const std::string start = is_failing ? "boom 17" : "pleat[C02]: rank 1 failed after all_to_all (boom 17)";
  require(seen.find(start) == 0, "rank ", is_failing ? 1 : 0, " saw `", seen, "`");
}

/// What ranks do whose jobs go well.
void operations(NcclComm& world) {
  const auto part = [&](const char* name, void (*f)(NcclComm&)) {
    world.rank() == 0 ? timed(name, [&] { f(world); }) : f(world);
  };
  part("groups go in any order", groups_go_in_any_order);
  part("NCCL's own", native_operations);
  part("in a graph", operations_in_a_graph);
  part("arena", arena_operations);
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const bool is_processes : {false, true}) {
    const std::string ranks = is_processes ? "processes: " : "threads: ";
    for (const char* suite : {"owned", "handles", "borrowed", "arena"}) {
      all.push_back({ranks + "suite, " + suite, is_processes, [suite] { run_suite(suite); }, 60});
    }
    all.push_back({ranks + "operations", is_processes, [] {
                     run_check(operations);
                     end_world();
                   }});
  }
  const auto with_deadlines = [&](const std::string& name, bool is_processes, std::function<void()> run, int limit_s,
                                  int killed = -1) {
    all.push_back({name, is_processes, std::move(run), limit_s, killed, true});
  };
  with_deadlines("threads: refusals", false, refusals, 30);
  with_deadlines("threads: borrowed, given up", false, borrowed_is_not_aborted, 30);
  for (const bool is_processes : {false, true}) {
    const std::string ranks = is_processes ? "processes: " : "threads: ";
    with_deadlines(
        ranks + "failures of operations", is_processes, [] { run_failures("failures", std::size_t{64} << 20); }, 160);
    // An arena whose run has failed is left to the streams that may still write to it.
    with_deadlines(
        ranks + "failures of windows", is_processes,
        [] { run_failures("failures of windows", std::size_t{256} << 20); }, 90);
  }
  with_deadlines("processes: an exception unwinds", true, process_unwinds, 30);
  with_deadlines("processes: a run throws", true, process_run_throws, 30);
  for (const std::string& name : deadly_operations()) {
    with_deadlines(
        "processes: killed in " + name, true, [name] { process_dies(name, Death::killed); }, 30, killed_rank);
    with_deadlines(
        "processes: exits in " + name, true, [name] { process_dies(name, Death::exits); }, 30);
  }
  all.push_back({"processes: healthy after all", true, [] {
                   run_check(healthy);
                   end_world();
                 }});
  return all;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 3 && std::strcmp(argv[1], "--case") == 0) return run_case(cases(), argv[2]);
  if (gpu_testing::lacks_gpus(1)) return gpu_testing::skipped;
  const bool lacks_gpus = pleat::cuda_device_count() < world_ranks;
  if (lacks_gpus) std::printf("skipped: worlds of %d ranks, which need a GPU each\n", world_ranks);
  const std::string part = argc > 1 ? argv[1] : lacks_gpus ? "threads: suite, " : "";
  return run_all(cases(), "/proc/self/exe", part);
}
