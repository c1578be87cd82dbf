// Stream-ordered and in-kernel signals between two GPUs, under random delays.
#include <pleat/cuda/device_signal.cuh>

#include <gpu/two_gpus_main.cuh>
#include <support/copy_now.hpp>
#include <support/repeats.hpp>

#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>

namespace {

using namespace two_gpus;
using pleat::check_launch;
using testing_support::repeats;

constexpr int slots = 2;
constexpr std::size_t slot_words = 4096;
constexpr std::size_t slot_bytes = slot_words * sizeof(std::uint32_t);
constexpr int barrier_ctas = 8, barrier_threads = 256;

// Kernels. Counts and random states lie in device memory, so that a replayed graph goes on with them.

__device__ std::uint32_t pattern(int rank, std::uint32_t count, std::size_t word) {
  return 0x9E3779B9u * (count * 2u + static_cast<std::uint32_t>(rank) + 1u) + static_cast<std::uint32_t>(word);
}
__device__ void wait_ns(std::uint64_t ns) {
  const std::uint64_t start = pleat::detail::global_time_ns();
  while (pleat::detail::global_time_ns() - start < ns) {
  }
}
__global__ void delay(std::uint64_t ns) {
  wait_ns(ns);
}
__global__ void random_delay(std::uint32_t* state, std::uint32_t limit_ns) {
  *state = *state * 1664525u + 1013904223u;
  wait_ns((*state >> 8) % limit_ns);
}
__global__ void fill(std::uint32_t* out, int rank, std::uint32_t* count) {  // one CTA
  for (std::size_t i = threadIdx.x; i < slot_words; i += blockDim.x) out[i] = pattern(rank, *count, i);
  __syncthreads();
  if (threadIdx.x == 0) ++*count;
}
__global__ void compare(const std::uint32_t* in, int rank, std::uint32_t* count, bool is_last, std::uint32_t* errors) {
  for (std::size_t i = threadIdx.x; i < slot_words; i += blockDim.x) {
    if (in[i] != pattern(rank, *count, i)) atomicAdd(errors, 1u);
  }
  __syncthreads();
  if (threadIdx.x == 0 && is_last) ++*count;
}
/// Each CTA stores to its part of the peer's block, meets the peer's CTA, and reads what that has stored to its own.
__global__ void __launch_bounds__(barrier_threads)
    store_and_meet(pleat::DeviceSignals signals, std::uint32_t* peer, const std::uint32_t* own, int rounds,
                   std::uint32_t* counts, std::uint32_t* errors) {
  const std::size_t at = blockIdx.x * blockDim.x + threadIdx.x;
  const int slot = static_cast<int>(blockIdx.x);
  const std::uint32_t first = counts[blockIdx.x];
  for (int round = 0; round < rounds; ++round) {
    const std::uint32_t count = first + static_cast<std::uint32_t>(round);
    if (peer != nullptr) peer[at] = pattern(signals.rank, count, at);
    if (!pleat::device_barrier(signals, slot)) return;
    if (peer == nullptr) continue;
    if (own[at] != pattern(1 - signals.rank, count, at)) atomicAdd(errors, 1u);
    if (!pleat::device_barrier(signals, slot)) return;
  }
  __syncthreads();
  if (threadIdx.x == 0) counts[blockIdx.x] = first + static_cast<std::uint32_t>(rounds);
}

/// Blocks through two slots of the peer, with a credit each, and random delays everywhere. `rounds` may be captured.
class Credits {
 public:
  explicit Credits(Rank& site)
      : site_(site),
        peers_(site.open(slots * slot_bytes, 2 * slots)),
        written_(site.word()),
        read_(site.word()),
        errors_(site.word()) {
    for (std::uint32_t*& seed : seeds_) {
      seed = site.word();
      const std::uint32_t value = 77u + static_cast<std::uint32_t>(site.rank * 5 + (&seed - seeds_) * 3);
      testing_support::copy_now(seed, &value, sizeof value);
    }
  }
  void bind(cudaStream_t s) {
    for (int slot = 0; slot < slots; ++slot) peers_.signal(other(), free_channel(slot), s);
  }
  void write(cudaStream_t s) {
    const int slot = next_write_ % slots;
    std::uint32_t* const target = at(other(), slot);
    pause(0, s);
    peers_.await(other(), free_channel(slot), s);
    if (next_write_++ % 3 == 0) {  // by stores of a kernel
      fill<<<1, 256, 0, s>>>(target, site_.rank, written_);
    } else {
      fill<<<1, 256, 0, s>>>(source(), site_.rank, written_);
      check_cuda(cudaMemcpyAsync(target, source(), slot_bytes, cudaMemcpyDeviceToDevice, s), "cudaMemcpyAsync");
    }
    check_launch("fill");
    peers_.signal(other(), full_channel(slot), s);
  }
  void read(cudaStream_t s) {
    const int slot = next_read_++ % slots;
    peers_.await(other(), full_channel(slot), s);
    compare<<<1, 256, 0, s>>>(at(site_.rank, slot), other(), read_, false, errors_);
    pause(1, s);
    compare<<<1, 256, 0, s>>>(at(site_.rank, slot), other(), read_, true, errors_);
    check_launch("compare");
    peers_.signal(other(), free_channel(slot), s);
  }
  void check(std::uint32_t rounds) const {
    require(Rank::fetch(errors_) == 0, std::to_string(Rank::fetch(errors_)) + " wrong words");
    require(Rank::fetch(read_) == rounds, "read " + std::to_string(Rank::fetch(read_)) + " blocks");
  }

 private:
  int other() const { return 1 - site_.rank; }
  static int free_channel(int slot) { return 2 * slot; }
  static int full_channel(int slot) { return 2 * slot + 1; }
  std::uint32_t* at(int rank, int slot) const {
    return reinterpret_cast<std::uint32_t*>(peers_.base(rank)) + static_cast<std::size_t>(slot) * slot_words;
  }
  std::uint32_t* source() const { return reinterpret_cast<std::uint32_t*>(source_.data()); }
  void pause(int role, cudaStream_t s) {
    random_delay<<<1, 1, 0, s>>>(seeds_[role], 20000);
    check_launch("random_delay");
  }

  Rank& site_;
  MappedPeers peers_;
  std::uint32_t *written_, *read_, *errors_;
  std::uint32_t* seeds_[2] = {};
  pleat::CudaBuffer source_{slot_bytes};
  int next_write_ = 0, next_read_ = 0;
};

std::string credits_on_random_streams(Rank& site) {
  const int rounds = repeats(3000);
  Credits credits(site);
  const CudaStream writers[] = {CudaStream(), CudaStream()}, readers[] = {CudaStream(), CudaStream()};
  const CudaEvent event;
  std::uint32_t random = 12345u + static_cast<std::uint32_t>(site.rank);
  int write = 0, read = 0;
  credits.bind(writers[0]);
  for (int round = 0; round < rounds; ++round) {
    random = random * 1664525u + 1013904223u;
    const int next_write = random >> 30 & 1, next_read = random >> 31 & 1;
    if (next_write != write) order(writers[next_write], writers[write], event);
    if (next_read != read) order(readers[next_read], readers[read], event);
    credits.write(writers[write = next_write]);
    credits.read(readers[read = next_read]);
  }
  for (int i = 0; i < 2; ++i) {
    site.wait(writers[i]);
    site.wait(readers[i]);
  }
  credits.check(static_cast<std::uint32_t>(rounds));
  return std::to_string(rounds) + " rounds";
}

/// Calls, a graph with an odd number of rounds captured after them, replays with calls in between.
std::string replays(Rank& site, bool two_streams) {
  constexpr int graph_rounds = 3;
  const int launches = repeats(1000);
  Credits credits(site);
  const CudaStream writer, second;
  const cudaStream_t reader = two_streams ? second : writer;
  const CudaEvent event;
  std::uint32_t rounds = 0;
  // The slots of a graph are baked: an odd number of rounds, and one more, bring the next call back to the first slot.
  const auto several = [&](int count) {
    if (two_streams) order(reader, writer, event);
    for (int i = 0; i < count; ++i) {
      credits.write(writer);
      credits.read(reader);
    }
    if (two_streams) order(writer, reader, event);
  };
  credits.bind(writer);
  several(2 * 5);
  rounds += 2 * 5;
  const Graph odd(writer, [&] { several(graph_rounds); });
  const Graph rest(writer, [&] { several(1); });
  for (int launch = 0; launch < launches; ++launch) {
    odd.launch(writer);
    rest.launch(writer);
    rounds += graph_rounds + 1;
    if (launch % 100 == 50) {
      several(2);
      rounds += 2;
    }
  }
  site.wait(writer);
  site.wait(reader);
  credits.check(rounds);
  return std::to_string(2 * launches) + " replays";
}
std::string replays_on_one_stream(Rank& site) {
  return replays(site, false);
}
std::string replays_on_two_streams(Rank& site) {
  // The branches of a graph enter the one hardware queue in an order that nobody chooses.
  if (has_one_connection()) return "skipped";
  return replays(site, true);
}

std::string barrier_replays(Rank& site) {
  const int launches = repeats(2000);
  MappedPeers peers = site.open(slot_bytes, 2 * pleat::peer_barrier_channels);
  const CudaStream s;
  std::uint32_t *written = site.word(), *read = site.word(), *errors = site.word(), *seed = site.word();
  const std::uint32_t start = static_cast<std::uint32_t>(site.rank);
  testing_support::copy_now(seed, &start, sizeof start);
  const auto round = [&] {
    random_delay<<<1, 1, 0, s>>>(seed, 10000);
    fill<<<1, 256, 0, s>>>(reinterpret_cast<std::uint32_t*>(peers.base(1 - site.rank)), site.rank, written);
    pleat::peer_barrier(peers, 0, s);
    random_delay<<<1, 1, 0, s>>>(seed, 10000);
    compare<<<1, 256, 0, s>>>(reinterpret_cast<std::uint32_t*>(peers.base(site.rank)), 1 - site.rank, read, true,
                              errors);
    check_launch("compare");
    pleat::peer_barrier(peers, pleat::peer_barrier_channels, s);
  };
  round();
  const Graph graph(s, round);
  for (int i = 0; i < launches; ++i) {
    graph.launch(s);
    if (i % 500 == 100) round();
  }
  site.wait(s);
  require(Rank::fetch(errors) == 0, "wrong words after a barrier");
  require(Rank::fetch(read) == static_cast<std::uint32_t>(launches + 1 + (launches + 399) / 500), "rounds are missing");
  return std::to_string(launches) + " replays";
}

std::string signal_latency(Rank& site) {
  constexpr int trips = 50;
  MappedPeers peers = site.open(0, 4);
  const CudaStream s;
  const int other = 1 - site.rank;
  const auto trip = [&](int channel) {
    for (int i = 0; i < trips; ++i) {
      if (site.rank == 0) peers.signal(other, channel, s);
      peers.await(other, channel, s);
      if (site.rank == 1) peers.signal(other, channel, s);
    }
  };
  const float called = median_us(site, s, 20, [&] { trip(0); });
  const Graph graph(s, [&] { trip(1); });
  const float replayed = median_us(site, s, 20, [&] { graph.launch(s); });
  return "round trip " + us(called / trips) + ", in a graph " + us(replayed / trips);
}

std::string device_barriers(Rank& site) {
  const int rounds = repeats(500);
  const std::size_t bytes = barrier_ctas * barrier_threads * sizeof(std::uint32_t);
  MappedPeers peers = site.open(bytes, 2 * barrier_ctas);
  const CudaStream s;
  pleat::require_resident(store_and_meet, "store_and_meet", barrier_ctas, barrier_threads);
  pleat::Carver measure;
  for (int i = 0; i < 2; ++i) pleat::carve_device_signals(measure, ranks, barrier_ctas);
  const pleat::CudaBuffer memory(measure.used_bytes());
  pleat::Carver carver(memory.block());
  const auto signals = bind_device_signals(peers, 0, barrier_ctas, carver, 5s, s);
  const auto lonely = bind_device_signals(peers, barrier_ctas, barrier_ctas, carver, 50ms, s);
  std::uint32_t* const errors = site.word();
  std::uint32_t* const counts = site.word();
  for (int i = 1; i < barrier_ctas; ++i) (void)site.word();
  const auto launch = [&](const pleat::DeviceSignals& with, bool stores) {
    store_and_meet<<<barrier_ctas, barrier_threads, 0, s>>>(
        with, stores ? reinterpret_cast<std::uint32_t*>(peers.base(1 - site.rank)) : nullptr,
        reinterpret_cast<const std::uint32_t*>(peers.base(site.rank)), rounds, counts, errors);
    check_launch("store_and_meet");
  };
  site.link.meet();
  launch(signals, true);
  const Graph graph(s, [&] { launch(signals, true); });
  for (int i = 0; i < 20; ++i) graph.launch(s);
  site.wait(s);
  pleat::check_device_status(Rank::fetch(signals.status), "store_and_meet");
  require(Rank::fetch(errors) == 0, "wrong words after a barrier of kernels");
  require(Rank::fetch(counts) == static_cast<std::uint32_t>(21 * rounds), "rounds are missing");
  const float time = median_us(site, s, 10, [&] { launch(signals, false); });
  pleat::check_device_status(Rank::fetch(signals.status), "store_and_meet");

  if (site.rank == 0) {  // the peer never comes
    launch(lonely, false);
    site.wait(s);
    try {
      pleat::check_device_status(Rank::fetch(lonely.status), "store_and_meet");
      throw std::runtime_error("no time-out was reported");
    } catch (const pleat::comm_error& e) {
      require(std::strstr(e.what(), "pleat[C27]: in store_and_meet, rank 0 of the window waited too long for rank 1"),
              e.what());
    }
  }
  return "barrier " + us(time / static_cast<float>(rounds));
}

/// Streams wait for signals that never come, of calls and of graphs, while kernels occupy every multiprocessor.
std::string release(Rank& site) {
  MappedPeers peers = site.open(0, 3);
  const CudaStream s, busy;
  const int other = 1 - site.rank;
  int device = 0, multiprocessors = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
             "cudaDeviceGetAttribute");
  const Graph graph(s, [&] {
    for (int i = 0; i < 3; ++i) peers.await(other, 1, s);
  });
  float longest = 0;
  const auto expect = [&](const std::function<void()>& check, const std::string& text) {
    const auto start = std::chrono::steady_clock::now();
    try {
      site.board->wait(s, 200ms, check);
    } catch (const pleat::comm_error& e) {
      longest =
          std::max(longest, std::chrono::duration<float, std::milli>(std::chrono::steady_clock::now() - start).count());
      require(std::strstr(e.what(), text.c_str()) != nullptr, std::string("unexpected: ") + e.what());
      require(cudaStreamQuery(s) == cudaSuccess, "the stream still waits after a release");
      return;
    }
    throw std::runtime_error("a wait for a signal that never came returned");
  };
  const auto occupy = [&] {
    if (has_one_connection()) return;
    delay<<<2 * static_cast<unsigned>(multiprocessors), 1024, 0, busy>>>(1000000000);
    check_launch("delay");
  };
  site.link.meet();
  for (int i = 0; i < 5; ++i) graph.launch(s);
  occupy();
  expect([] {}, "no signal for graphs on channel 1 of window");
  site.wait(busy);
  for (int i = 0; i < 10; ++i) graph.launch(s);
  expect([] { pleat::fail<pleat::comm_error>("pleat[C02]: rank 7 failed"); }, "rank 7 failed");
  site.link.meet();
  return "longest " + us(1000 * longest);
}
/// The same for calls, which count: the text names the signal.
std::string release_of_calls(Rank& site) {
  MappedPeers peers = site.open(0, 3);
  const CudaStream s;
  const int other = 1 - site.rank;
  for (int i = 0; i < 2; ++i) {
    peers.signal(other, 2, s);
    peers.await(other, 2, s);
  }
  site.wait(s);
  site.link.meet();
  for (int i = 0; i < 4; ++i) peers.await(other, 2, s);
  try {
    site.board->wait(s, 200ms, [] {});
  } catch (const pleat::comm_error& e) {
    const std::string text = "pleat[C04]: rank " + std::to_string(site.rank) +
                             " waited 200 ms on a stream for signal 3 on channel 2 of window";
    require(std::strstr(e.what(), text.c_str()) != nullptr, std::string("unexpected: ") + e.what());
    require(std::strstr(e.what(), ("from rank " + std::to_string(other)).c_str()) != nullptr, e.what());
    require(cudaStreamQuery(s) == cudaSuccess, "the stream still waits after a release");
    site.link.meet();
    return "";
  }
  throw std::runtime_error("a wait for a signal that never came returned");
}

constexpr Case cases[] = {
    {"credits, random streams", credits_on_random_streams},
    {"graph replays, one stream", replays_on_one_stream},
    {"graph replays, two streams", replays_on_two_streams},
    {"barrier, graph replays", barrier_replays},
    {"signals", signal_latency},
    {"kernels", device_barriers},
    {"release of calls", release_of_calls},  // from here on flags are released
    {"release", release},
};

}  // namespace

int main(int argc, char** argv) {  // [<name of a way>]
  return run_all(cases, all_ways, argc > 1 ? argv[1] : nullptr);
}
