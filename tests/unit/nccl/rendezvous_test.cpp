// The rendezvous of processes over loopback: everybody meets, late or not; strangers and missing ranks (C25).
#include <thread>

#include "processes.hpp"

#include <doctest/doctest.h>

namespace {

using namespace nccl_testing;

TEST_CASE("processes that start in any order meet and gather") {
  for (const int ranks : {1, 2, 3, 8}) {
    const int port = free_port();
    const auto endings = run_processes(ranks, [&](int rank) {
      ::usleep(static_cast<useconds_t>((rank * 7 + 5) % 4 * 20000));  // rank 0 is not the first
      pleat::Job job(pleat::rendezvous(environment_of(rank, ranks, port), 10s), 10s);
      for (const std::uint64_t tag : {20, 21}) {
        const auto texts = job.meet(
            first_ranks(ranks), tag,
            std::string(static_cast<std::size_t>(rank) * 3000, 'x') + std::to_string(rank + static_cast<int>(tag)));
        for (int r = 0; r < ranks; ++r) {
          const std::string expected =
              std::string(static_cast<std::size_t>(r) * 3000, 'x') + std::to_string(r + static_cast<int>(tag));
          if (texts.at(static_cast<std::size_t>(r)) != expected) throw std::runtime_error("another text was gathered");
        }
      }
    });
    for (const Ending& ending : endings) CHECK_MESSAGE(ending.text == "returned", ranks, " ranks: ", ending.text);
  }
}

TEST_CASE("strangers on rank 0's port keep nobody from meeting") {
  const int port = free_port();
  const auto endings = run_processes(5, [&](int process) {
    if (process < 2) {
      ::usleep(process == 0 ? 100000 : 400000);  // the strangers come first
      pleat::Job job(pleat::rendezvous(environment_of(process, 2, port), 10s), 10s);
      job.meet(first_ranks(2), 20);
      ::usleep(100000);
      job.meet(first_ranks(2), 21);
    } else if (process == 2) {  // a rank of another job
      try {
        (void)pleat::rendezvous(environment_of(1, 2, port, "/other"), 1s);
      } catch (const pleat::comm_error& e) {
        if (std::string(e.what()).find("pleat[C25]: rank 1 waited 1000 ms for rank 0") == std::string::npos) throw;
      }
    } else {  // one that says nothing, and one that talks nonsense
      const auto address = pleat::detail::resolve("127.0.0.1", port).front();
      pleat::Socket socket;
      const auto until = std::chrono::steady_clock::now() + 5s;
      while (!socket.is_open() && std::chrono::steady_clock::now() < until) {
        socket = pleat::detail::connect_to(address, until);
      }
      const std::string nonsense(300, process == 3 ? 'n' : ' ');
      if (process == 3) (void)!::send(socket.get(), nonsense.data(), nonsense.size(), MSG_NOSIGNAL);
      ::usleep(3000000);
    }
  });
  for (const Ending& ending : endings) CHECK_MESSAGE(ending.text == "returned", ending.text);
  CHECK(endings[0].after < 2500ms);
}

TEST_CASE("[C25]: who does not come is named, by rank 0 and to the others") {
  const int port = free_port();
  const auto endings = run_processes(4, [&](int rank) {
    if (rank == 2) return;
    (void)pleat::rendezvous(environment_of(rank, 4, port), 700ms);
  });
  CHECK(endings[0].text.find("pleat[C25]: rank 0 waited 700 ms on port") == 0);
  CHECK(endings[0].text.find("for rank 2") != std::string::npos);
  CHECK(endings[1].text.find("pleat[C25]: rank 1 waited 700 ms for rank 0 and the others") == 0);
  for (const int rank : {0, 1, 3}) CHECK(endings[static_cast<std::size_t>(rank)].after < 3s);
}
TEST_CASE("[C25]: rank 0 is not there") {
  const auto endings =
      run_processes(1, [&](int) { (void)pleat::rendezvous(environment_of(1, 2, free_port()), 300ms); });
  CHECK(endings[0].text.find("pleat[C25]: rank 1 waited 300 ms for rank 0") == 0);
  CHECK(endings[0].text.find("Connection refused") != std::string::npos);
  CHECK(endings[0].after < 2s);
}
TEST_CASE("[C25]: a port that is taken, a name that nobody has") {
  const auto loopback = pleat::detail::resolve("127.0.0.1", 0).front();
  const pleat::Socket taken = pleat::detail::listen_at(loopback, 0, 1);
  const int port = pleat::detail::port_of(taken);
  const auto endings = run_processes(2, [&](int process) {
    auto environment = environment_of(0, 2, port);
    if (process == 1) environment.address = "no-such-host.invalid";
    (void)pleat::rendezvous(environment, 300ms);
  });
  CHECK(endings[0].text.find("pleat[C25]: cannot listen on port " + std::to_string(port)) == 0);
  CHECK(endings[0].text.find("PLEAT_PORT") != std::string::npos);
  CHECK(endings[1].text.find("for the name no-such-host.invalid") != std::string::npos);
}

}  // namespace
