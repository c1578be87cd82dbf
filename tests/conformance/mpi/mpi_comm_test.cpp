// MpiComm and handles on it, through the communicator suite, on as many ranks as mpirun has started; and the rendezvous
// of ranks that MPI tells where to meet.
#include <pleat/mpi.hpp>

#include <cstdio>
#include <cstdlib>
#include <string>

#include <pleat/core/host/leaf.hpp>
#include <pleat/nccl/rendezvous.hpp>

#include <conformance/collectives.hpp>
#include <conformance/exchanges.hpp>
#include <conformance/failures.hpp>
#include <conformance/host_threads.hpp>
#include <conformance/splits.hpp>
#include <conformance/sums.hpp>

#include <support/process_world.hpp>

#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

namespace {

using namespace conformance;

/// The one world of this process's checks. The suites' backends have no object that could hold it.
testing_support::ProcessWorld<pleat::MpiComm>* world = nullptr;

struct MpiRanks {
  using comm_type = pleat::MpiComm;
  using Stream = HostThreads::Stream;
  using Buffer = HostThreads::Buffer;
  template <class T>
  using Shared = testing_support::Shared<T>;

  static constexpr Traits traits{.short_deadline = 400ms, .random_failures = 4};
  static bool has_size(int ranks) {
    int started = 0;
    MPI_Comm_size(MPI_COMM_WORLD, &started);
    return ranks == started;
  }
  template <class F>
  static void run(int, milliseconds, F f) {
    world->run(f);
  }
  template <class F>
  static void run_anew(int, milliseconds deadline, F f) {
    world->run_anew(f, deadline);
  }
  static std::function<std::string()> status(const pleat::MpiComm& comm) {
    return [job = &comm.job()] { return std::string("rank 0: ") + job->last_operation(); };
  }
};
static_assert(backend<MpiRanks>);

TEST_CASE("MpiComm: collectives") {
  check_collectives<MpiRanks, Whole>();
}
TEST_CASE("MpiComm: exchanges") {
  check_exchanges<MpiRanks, Whole>();
}
TEST_CASE("MpiComm: splits") {
  check_splits<MpiRanks>();
}
TEST_CASE("GroupComm over MpiComm: collectives") {
  check_collectives<MpiRanks, Handle>();
}
TEST_CASE("GroupComm over MpiComm: rank-ordered sums") {
  check_sums<MpiRanks>();
}
TEST_CASE("MpiComm: failures") {
  check_failures<MpiRanks>();
}

TEST_CASE("C37: what MPI says of a call that fails") {
  CHECK_THROWS_WITH_AS(pleat::check_mpi(MPI_ERR_COMM, "MPI_Bcast"), doctest::Contains("pleat[C37]: MPI_Bcast failed: "),
                       pleat::comm_error);
}

TEST_CASE("MPI tells ranks where they meet without it") {
  const pleat::LauncherEnvironment place = pleat::launcher_of(MPI_COMM_WORLD);
  REQUIRE(place.port > 0);
  CHECK(place.local_rank == place.rank);  // one machine
  if (place.size == 1) return;
  pleat::Job job(pleat::rendezvous(place, 20s), 20s);
  std::vector<int> everybody;
  for (int r = 0; r < job.size(); ++r) everybody.push_back(r);
  const auto texts = job.meet(everybody, pleat::Job::first_tag, std::to_string(job.rank()));
  for (const int r : everybody) CHECK(texts[static_cast<std::size_t>(r)] == std::to_string(r));
}

/// A file of zeros that all processes map, named by the first.
void share_file() {
  char path[64] = "/tmp/pleat_mpi_test_XXXXXX";
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  if (rank == 0) {
    const int file = ::mkstemp(path);
    if (file < 0 || ::ftruncate(file, testing_support::shared_file_bytes) != 0) MPI_Abort(MPI_COMM_WORLD, 3);
    ::close(file);
  }
  MPI_Bcast(path, sizeof path, MPI_BYTE, 0, MPI_COMM_WORLD);
  ::setenv(testing_support::shared_file_variable, path, 1);
  testing_support::shared_pages.emplace();
  MPI_Barrier(MPI_COMM_WORLD);
  if (rank == 0) ::unlink(path);
}

}  // namespace

int main(int argc, char** argv) {
  int status = 1;
  try {
    pleat::detail::MpiSession session;
    share_file();
    testing_support::ProcessWorld<pleat::MpiComm> processes(
        [](milliseconds deadline) { return pleat::MpiComm::create(MPI_COMM_WORLD, {.deadline = deadline}); });
    world = &processes;
    status = doctest::Context(argc, argv).run();
    processes.end();
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
  }
  return status;
}
