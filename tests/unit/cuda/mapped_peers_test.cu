// Mapped peers with both ranks' memory on one GPU: which flags are written, graphs, releases, and kernels that wait.
// Enqueued so that no stream ever waits for another, except where a test releases it. Two GPUs: tests/gpu.
#include <pleat/cuda/device_signal.cuh>
#include <pleat/cuda/mapped_peers.hpp>

#include <memory>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <support/copy_now.hpp>
#include <support/repeats.hpp>

namespace {

using namespace std::chrono_literals;
using pleat::check_cuda;
using pleat::CudaStream;
using pleat::MappedPeers;
using pleat::SignalBoard;

constexpr int ranks = 2;

/// The blocks and boards of some ranks, world ranks 4, 7, 10 ...
struct World {
  explicit World(int size = ranks, std::size_t flag_bytes = 4096) {
    std::vector<int> names;
    for (int r = 0; r < size; ++r) names.push_back(4 + 3 * r);
    for (int r = 0; r < size; ++r) {
      members.push_back(r);
      flags.emplace_back(flag_bytes);
      check_cuda(cudaMemset(flags[r].data(), 0, flag_bytes), "cudaMemset");
      boards.push_back(std::make_shared<SignalBoard>(pleat::CudaDriver(), names, r, flags[r].block()));
    }
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  /// Each rank's side of the next window.
  std::vector<MappedPeers> open(int channels) {
    pleat::MappedWindow window{members, {}, {}, channels};
    for (const int r : members) {
      window.bases.push_back(flags[r].data());
      window.flags.push_back(words(r));
    }
    std::vector<MappedPeers> peers;
    for (const auto& board : boards) peers.emplace_back(board, window);
    return peers;
  }
  std::uint64_t* words(int rank) const { return reinterpret_cast<std::uint64_t*>(flags[rank].data()); }

  std::vector<int> members;
  std::vector<pleat::CudaBuffer> flags;
  std::vector<std::shared_ptr<SignalBoard>> boards;
};

std::uint64_t fetch(const std::uint64_t* word) {
  std::uint64_t value = 0;
  testing_support::copy_now(&value, word, sizeof value);
  return value;
}

template <class F>
std::string text_of(F f) {
  try {
    f();
  } catch (const pleat::comm_error& e) {
    return e.what();
  }
  return "no error";
}
bool contains(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

template <class Work>
cudaGraphExec_t captured(cudaStream_t s, Work work) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  check_cuda(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  work();
  check_cuda(cudaStreamEndCapture(s, &graph), "cudaStreamEndCapture");
  check_cuda(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
  check_cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
  return executable;
}

__global__ void meet(pleat::DeviceSignals signals, int rounds, int* failures) {
  for (int i = 0; i < rounds; ++i) {
    if (!pleat::device_barrier(signals, static_cast<int>(blockIdx.x))) {
      if (threadIdx.x == 0) atomicAdd(failures, 1);
      return;
    }
  }
}

TEST_CASE("a signal counts in the receiver's flag of its source and channel, and nowhere else") {
  World world;
  auto first = world.open(2), second = world.open(3);
  const CudaStream s;
  for (int i = 0; i < 3; ++i) first[0].signal(1, 1, s);
  for (int i = 0; i < 2; ++i) second[1].signal(0, 2, s);
  second[0].signal(0, 0, s);
  for (int i = 0; i < 3; ++i) first[1].await(0, 1, s);
  second[0].await(1, 2, s);
  second[0].await(0, 0, s);
  for (auto& board : world.boards) board->wait(s, 5s, [] {});
  std::uint64_t sums[ranks] = {};
  for (int r = 0; r < ranks; ++r) {
    for (int word = 0; word < 10; ++word) sums[r] += fetch(world.words(r) + word);
  }
  CHECK(sums[0] == 3);
  CHECK(sums[1] == 3);
  CHECK(fetch(first[1].incoming(0, 1)) == 3);
  CHECK(fetch(second[0].incoming(1, 2)) == 2);
  CHECK(fetch(second[0].incoming(0, 0)) == 1);
  CHECK(first[0].outgoing(1, 1) == first[1].incoming(0, 1));
  CHECK(second[1].outgoing(0, 2) == second[0].incoming(1, 2));
  CHECK(first[1].rank() == 1);
}

TEST_CASE("all peers at once: the flags that single signals write, outside graphs and in them") {
  constexpr int size = 5;
  World world(size);
  world.open(1);
  auto peers = world.open(2);
  const CudaStream s;
  const auto round = [&](int channel) {
    for (MappedPeers& mine : peers) pleat::detail::signal_peers(mine, channel, s);
    for (MappedPeers& mine : peers) pleat::detail::await_peers(mine, channel, s);
  };
  for (int i = 0; i < 3; ++i) round(1);
  peers[2].signal(3, 1, s);
  peers[3].await(2, 1, s);
  CHECK_NOTHROW(world.boards[0]->wait(s, 5s, [] {}));
  const auto expect = [&](int channel, std::uint64_t value, std::uint64_t of_pair) {
    for (int me = 0; me < size; ++me) {
      for (int peer = 0; peer < size; ++peer) {
        CAPTURE(me);
        CAPTURE(peer);
        const std::uint64_t expected = me == peer ? 0 : me == 3 && peer == 2 ? of_pair : value;
        CHECK(fetch(peers[me].incoming(peer, channel)) == expected);
      }
    }
  };
  expect(1, 3, 4);
  expect(0, 0, 0);
  for (MappedPeers& mine : peers) pleat::detail::signal_peers(mine, 0, s);  // the credit of the bind
  const cudaGraphExec_t graph = captured(s, [&] {
    for (MappedPeers& mine : peers) pleat::detail::await_peers(mine, 0, s);
    for (MappedPeers& mine : peers) pleat::detail::signal_peers(mine, 0, s);
  });
  for (int i = 0; i < 3; ++i) check_cuda(cudaGraphLaunch(graph, s), "cudaGraphLaunch");
  CHECK_NOTHROW(world.boards[0]->wait(s, 5s, [] {}));
  expect(0, 2, 2);
  for (MappedPeers& mine : peers) pleat::detail::await_peers(mine, 0, s);
  CHECK_NOTHROW(world.boards[0]->wait(s, 5s, [] {}));
  expect(0, pleat::signal_value::taken, pleat::signal_value::taken);
  (void)cudaGraphExecDestroy(graph);
}

TEST_CASE("graphs take the credit that was given before them, on every replay, and calls go on") {
  World world;
  auto peers = world.open(2);
  const CudaStream s;
  const auto round = [&] {
    peers[0].await(1, 0, s);
    peers[0].signal(1, 1, s);
    peers[1].await(0, 1, s);
    peers[1].signal(0, 0, s);
  };
  peers[1].signal(0, 0, s);  // the credit of the bind
  for (int i = 0; i < 3; ++i) round();
  const cudaGraphExec_t graph = captured(s, round);
  for (int i = 0; i < 5; ++i) {
    check_cuda(cudaGraphLaunch(graph, s), "cudaGraphLaunch");
    round();
    check_cuda(cudaGraphLaunch(graph, s), "cudaGraphLaunch");
  }
  CHECK_NOTHROW(world.boards[0]->wait(s, 5s, [] {}));
  CHECK(fetch(peers[1].incoming(0, 1)) == pleat::signal_value::taken);
  CHECK(fetch(peers[0].incoming(1, 0)) != pleat::signal_value::taken);
  (void)cudaGraphExecDestroy(graph);
}

TEST_CASE("C04 names the signal that did not come, and the stream is free") {
  World world;
  world.open(3);
  auto peers = world.open(2);
  const CudaStream s;
  peers[1].signal(0, 1, s);
  for (int i = 0; i < 3; ++i) peers[0].await(1, 1, s);
  peers[0].await(0, 0, s);
  const std::string text = text_of([&] { world.boards[0]->wait(s, 50ms, [] {}); });
  CHECK(
      contains(text, "pleat[C04]: rank 4 waited 50 ms on a stream for signal 1 on channel 0 of window 1 from rank 4"));
  CHECK(contains(text, " and 1 more"));
  CHECK(cudaStreamQuery(s) == cudaSuccess);
  world.boards[0]->release();  // again, and from now on waits end at once
  peers[0].await(1, 1, s);
  CHECK(contains(text_of([&] { world.boards[0]->wait(s, 5s, [] {}); }), "no error"));
}

TEST_CASE("a failure ends the waits of graphs, however many are enqueued") {
  World world;
  auto peers = world.open(1);
  const CudaStream s;
  const cudaGraphExec_t graph = captured(s, [&] {
    for (int i = 0; i < 4; ++i) peers[0].await(1, 0, s);
  });
  for (int i = 0; i < 20; ++i) check_cuda(cudaGraphLaunch(graph, s), "cudaGraphLaunch");
  int calls = 0;
  const std::string text = text_of([&] {
    world.boards[0]->wait(s, 5s, [&] {
      if (++calls == 3) pleat::fail<pleat::comm_error>("pleat[C02]: rank 7 failed");
    });
  });
  CHECK(text == "pleat[C02]: rank 7 failed");
  CHECK(cudaStreamQuery(s) == cudaSuccess);
  (void)cudaGraphExecDestroy(graph);
}

TEST_CASE("C04 of a graph tells where no signal is") {
  World world;
  auto peers = world.open(2);
  const CudaStream s;
  const cudaGraphExec_t graph = captured(s, [&] { peers[0].await(1, 1, s); });
  check_cuda(cudaGraphLaunch(graph, s), "cudaGraphLaunch");
  CHECK(contains(text_of([&] { world.boards[0]->wait(s, 50ms, [] {}); }),
                 "; no signal for graphs on channel 1 of window 0 from rank 7"));
  (void)cudaGraphExecDestroy(graph);
}

TEST_CASE("C08: the channels are used up") {
  World world(ranks, 5 * ranks * sizeof(std::uint64_t));
  world.open(5);
  CHECK(contains(text_of([&] { world.open(1); }),
                 "pleat[C08]: the arena has 5 channels, the operations bound to it so far need 6; "
                 "size it by the sum of footprint().channels"));
}

TEST_CASE("kernels meet at a barrier; C27 when the peer does not come") {
  constexpr int ctas = 3, rounds = 100;
  World world;
  auto peers = world.open(ctas);
  const CudaStream streams[ranks];
  pleat::Carver measure;
  pleat::carve_device_signals(measure, ranks, ctas);
  const pleat::CudaBuffer memory[] = {pleat::CudaBuffer(measure.used_bytes()), pleat::CudaBuffer(measure.used_bytes())};
  const pleat::CudaBuffer failures(sizeof(int));
  check_cuda(cudaMemset(failures.data(), 0, sizeof(int)), "cudaMemset");
  pleat::require_resident(meet, "meet", ctas, 64);
  pleat::DeviceSignals signals[ranks];
  for (int r = 0; r < ranks; ++r) {
    pleat::Carver carver(memory[r].block());
    signals[r] = bind_device_signals(peers[r], 0, ctas, carver, 2s, streams[r]);
  }
  const auto launch = [&](int r) {
    meet<<<ctas, 64, 0, streams[r]>>>(signals[r], rounds, reinterpret_cast<int*>(failures.data()));
    pleat::check_launch("meet");
  };
  for (int i = 0; i < 2; ++i) {
    for (int r = 0; r < ranks; ++r) launch(r);
  }
  for (int r = 0; r < ranks; ++r) {
    CHECK_NOTHROW(world.boards[r]->wait(streams[r], 10s, [] {}));
    CHECK(fetch(signals[r].status) == 0);
    CHECK(fetch(peers[r].incoming(1 - r, ctas - 1)) == 2 * rounds);
  }
  launch(1);
  CHECK_NOTHROW(world.boards[1]->wait(streams[1], 10s, [] {}));
  CHECK(contains(text_of([&] { pleat::check_device_status(fetch(signals[1].status), "meet"); }),
                 "pleat[C27]: in meet, rank 1 of the window waited too long for rank 0 on slot "));
  CHECK(pleat::DeviceTimeout::of(pleat::DeviceTimeout{300, 100000, 7654321}.packed()).peer == 100000);
  CHECK(pleat::DeviceTimeout::of(pleat::DeviceTimeout{300, 100000, 7654321}.packed()).rank == 300);
  CHECK(pleat::DeviceTimeout::of(pleat::DeviceTimeout{300, 100000, 7654321}.packed()).slot == 7654321);
}

TEST_CASE("C28: a grid whose CTAs are not all resident may not wait") {
  CHECK_NOTHROW(pleat::require_resident(meet, "meet", 1, 1024));
  CHECK(contains(text_of([] { pleat::require_resident(meet, "meet", 1 << 20, 1024); }),
                 "pleat[C28]: meet waits for peers, so its 1048576 CTAs of 1024 threads"));
}

TEST_CASE("C20: what the driver says about a wrong address") {
  if (testing_support::is_quick()) return;  // compute-sanitizer reports the call that fails
  const CudaStream s;
  const pleat::CudaDriver driver;
  std::string text = "no error";
  try {
    driver.run(s, driver.write_step(reinterpret_cast<std::uint64_t*>(3), 1));
  } catch (const pleat::cuda_error& e) {
    text = e.what();
  }
  CHECK(contains(text, "pleat[C20]: cuStreamWriteValue64 failed: CUDA_ERROR_INVALID_VALUE"));
}

}  // namespace
