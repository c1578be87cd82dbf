// One rank of a job that a launcher has started: finds the others, hears from each, and says so.
#include <chrono>
#include <cstdio>
#include <exception>
#include <string>
#include <thread>

#include <pleat/nccl/rendezvous.hpp>

int main() try {
  using namespace std::chrono_literals;
  const auto environment = pleat::LauncherEnvironment::from_process();
  const auto link = pleat::rendezvous(environment, 30s);
  for (int peer = 0; peer < environment.size; ++peer) {
    if (peer != environment.rank) link->send(peer, 1, std::to_string(100 * environment.rank + peer));
  }
  std::string heard;
  for (int peer = 0; peer < environment.size; ++peer) {
    if (peer == environment.rank) continue;
    for (auto message = link->take(peer, 1);; message = link->take(peer, 1)) {
      if (message) {
        heard.append(" ").append(*message);
        break;
      }
      if (link->is_lost(peer)) throw pleat::comm_error(pleat::message_of("lost rank ", peer));
      link->progress();
      std::this_thread::sleep_for(1ms);
    }
  }
  std::printf("%s rank %d of %d, local %d, heard%s\n", environment.launcher, environment.rank, environment.size,
              environment.local_rank, heard.c_str());
} catch (const std::exception& e) {
  std::fprintf(stderr, "%s\n", e.what());
  return 1;
}
