// PeerCollectives and PeerReduceScatter on two GPUs: stores and copies in any order under random delays, graphs that
// are replayed, and a peer that does not come.
#include <pleat/cuda/peer_collectives.cuh>
#include <pleat/cuda/peer_sums.cuh>

#include <gpu/two_gpus_main.cuh>
#include <support/copy_now.hpp>
#include <support/repeats.hpp>

#include <deque>
#include <numeric>
#include <random>

namespace {

using namespace two_gpus;
using pleat::check_launch;
using pleat::DType;
using testing_support::repeats;
using Collectives = pleat::PeerCollectives<pleat::CudaExecutor, MappedPeers, pleat::MappedStores>;
using Sums = pleat::PeerReduceScatter<pleat::CudaExecutor, MappedPeers, pleat::MappedSums>;

constexpr std::size_t most_bytes = std::size_t{128} << 10;
/// The grids of the library's table and small ones, for small blocks.
constexpr pleat::TransferTable table{
    .stores = {{{1000, 1}, {std::size_t{4} << 10, 4}, {std::size_t{8} << 10, 32}, {std::size_t{16} << 10, 64}}},
    .beside_bytes = std::size_t{48} << 10,
    .sums = {{{std::size_t{1} << 10, 2}, {std::size_t{4} << 10, 32}, {std::size_t{32} << 10, 64}}}};

/// Byte `i` of what rank `from` brings to call `call`.
__device__ std::uint8_t pattern(int from, std::uint32_t call, std::size_t i) {
  const std::uint32_t h =
      (static_cast<std::uint32_t>(i) + 0x9E3779B9u * (2 * call + static_cast<std::uint32_t>(from) + 1)) * 0x85EBCA6Bu;
  return static_cast<std::uint8_t>(h >> 24 ^ h >> 11);
}
__global__ void fill(std::uint8_t* out, std::size_t bytes, int from, const std::uint32_t* call) {
  for (std::size_t i = threadIdx.x; i < bytes; i += blockDim.x) out[i] = pattern(from, *call, i);
}
__global__ void compare(const std::uint8_t* found, std::size_t bytes, int from, std::size_t first,
                        const std::uint32_t* call, std::uint32_t* errors) {
  for (std::size_t i = threadIdx.x; i < bytes; i += blockDim.x) {
    if (found[i] != pattern(from, *call, first + i)) atomicAdd(errors, 1u);
  }
}
__global__ void next_call(std::uint32_t* call) {
  ++*call;
}
__global__ void delay(std::uint64_t ns) {
  const std::uint64_t start = pleat::detail::global_time_ns();
  while (pleat::detail::global_time_ns() - start < ns) {
  }
}
/// Integers as floats, so that every order of the sum has its bits.
__global__ void fill_terms(float* out, std::size_t elems, int from, const std::uint32_t* call) {
  for (std::size_t i = threadIdx.x; i < elems; i += blockDim.x) {
    out[i] = static_cast<float>((i * 7 + *call * 31 + static_cast<std::size_t>(from) * 1009) % 65521);
  }
}
__global__ void compare_sums(const float* found, std::size_t elems, std::size_t first, const std::uint32_t* call,
                             std::uint32_t* errors) {
  for (std::size_t i = threadIdx.x; i < elems; i += blockDim.x) {
    float sum = 0;
    for (std::size_t from = 0; from < ranks; ++from) {
      sum += static_cast<float>(((first + i) * 7 + *call * 31 + from * 1009) % 65521);
    }
    if (found[i] != sum) atomicAdd(errors, 1u);
  }
}

/// 0, 1, 2 .. in device memory: what names the call whose data a kernel writes or looks for.
class Numbers {
 public:
  explicit Numbers(int count) : memory_(static_cast<std::size_t>(count) * sizeof(std::uint32_t)) {
    std::vector<std::uint32_t> counted(static_cast<std::size_t>(count));
    std::iota(counted.begin(), counted.end(), 0u);
    testing_support::copy_now(memory_.data(), counted.data(), memory_.size_bytes());
  }
  std::uint32_t* at(int i) const { return reinterpret_cast<std::uint32_t*>(memory_.data()) + i; }

 private:
  pleat::CudaBuffer memory_;
};

/// One rank's side: the operation, an input, and what tells whether results are right.
struct Subject {
  explicit Subject(Rank& on, std::chrono::milliseconds deadline = 15s)
      : site(on),
        plan(pleat::plan_peer_collectives<pleat::MappedStores>(ranks, most_bytes, table)),
        persistent(plan.footprint().persistent),
        in(ranks * most_bytes),
        op(plan, {}, on.open(plan.footprint().symmetric, plan.channels()), persistent.block(), deadline, s),
        errors(on.word()),
        call(on.word()) {
    site.wait(s);
    site.link.meet();
  }
  std::uint8_t* input() const { return reinterpret_cast<std::uint8_t*>(in.data()); }

  /// One call with the data of `*call`; the input is overwritten at once.
  const std::byte* gather(std::size_t bytes, bool in_place = false) {
    std::uint8_t* const from = in_place ? reinterpret_cast<std::uint8_t*>(op.own_block(bytes, DType::u8)) : input();
    fill<<<1, 512, 0, s>>>(from, bytes, site.rank, call);
    const std::byte* const out = op.all_gather(from, bytes, DType::u8, {s, comm});
    spoil(in_place ? 0 : bytes);
    return out;
  }
  const std::byte* to_all(std::size_t bytes) {
    fill<<<1, 512, 0, s>>>(input(), ranks * bytes, site.rank, call);
    const std::byte* const out = op.all_to_all(input(), bytes, DType::u8, {s, comm});
    spoil(ranks * bytes);
    return out;
  }
  void check_gathered(const std::byte* out, std::size_t bytes, const std::uint32_t* of_call) {
    for (int r = 0; r < ranks; ++r) check(out, r, bytes, 0, of_call);
  }
  void check_from_all(const std::byte* out, std::size_t bytes, const std::uint32_t* of_call) {
    for (int r = 0; r < ranks; ++r) check(out, r, bytes, static_cast<std::size_t>(site.rank) * bytes, of_call);
  }
  void finish() {
    site.wait(s);
    site.wait(comm);
    op.check_stores(s);
    require(Rank::fetch(errors) == 0, "wrong bytes");
  }

  Rank& site;
  const CudaStream s, comm;
  pleat::PeerCollectivesPlan plan;
  pleat::CudaBuffer persistent, in;
  Collectives op;
  std::uint32_t *errors, *call;

 private:
  void spoil(std::size_t bytes) { check_cuda(cudaMemsetAsync(in.data(), 0xee, bytes, s), "cudaMemsetAsync"); }
  void check(const std::byte* out, int r, std::size_t bytes, std::size_t first, const std::uint32_t* of_call) {
    const auto* const block = reinterpret_cast<const std::uint8_t*>(out) + static_cast<std::size_t>(r) * bytes;
    compare<<<1, 512, 0, s>>>(block, bytes, r, first, of_call, errors);
    check_launch("compare");
  }
};

/// All sizes and kinds of calls in a random order; results are looked at again before they are given back.
std::string calls(Rank& site) {
  const int rounds = repeats(1500);
  constexpr std::size_t sizes[] = {0, 1, 4, 100, 4096, 8000, 16384, 16388, 40000, 49152, 65537, most_bytes};
  Subject subject(site);
  struct InUse {
    const std::byte* out;
    std::size_t bytes;
    bool is_gathered;
    int round;
  };
  std::mt19937 common(5), own(static_cast<unsigned>(site.rank));
  const Numbers numbers(rounds);
  const auto dawdle = [&] {
    const auto draw = own();
    if (draw % 4 != 0) return;
    const cudaStream_t on = draw / 4 % 2 == 0 ? subject.s : subject.comm;
    delay<<<1, 1, 0, on>>>(draw / 8 % 60000);
    check_launch("delay");
  };
  const auto look = [&](const InUse& result) {
    if (result.is_gathered) {
      subject.check_gathered(result.out, result.bytes, numbers.at(result.round));
    } else {
      subject.check_from_all(result.out, result.bytes, numbers.at(result.round));
    }
  };
  std::deque<InUse> in_use;
  for (int round = 0; round < rounds; ++round) {
    const std::size_t bytes = sizes[common() % std::size(sizes)];
    const auto kind = common() % 3;
    subject.call = numbers.at(round);
    dawdle();
    const std::byte* const out = kind == 0 ? subject.to_all(bytes) : subject.gather(bytes, kind == 2);
    in_use.push_back({out, bytes, kind != 0, round});
    if (common() % 2 == 0) look(in_use.back());
    for (const bool again = common() % 2 == 0; in_use.size() > (again ? 0 : 1); in_use.pop_front()) {
      look(in_use.front());
      dawdle();
      subject.op.release({subject.s, subject.comm});
    }
  }
  subject.finish();
  return std::to_string(rounds) + " calls";
}

/// A graph of two calls of each kind of transfer, and calls in between.
std::string replays(Rank& site) {
  const int launches = repeats(500);
  Subject subject(site);
  const auto calls = [&] {
    for (const std::size_t bytes : {std::size_t{1000}, std::size_t{30000}, most_bytes}) {
      for (int i = 0; i < 2; ++i) {
        const std::byte* const out = i == 0 ? subject.gather(bytes) : subject.to_all(bytes);
        i == 0 ? subject.check_gathered(out, bytes, subject.call) : subject.check_from_all(out, bytes, subject.call);
        subject.op.release({subject.s, subject.comm});
        next_call<<<1, 1, 0, subject.s>>>(subject.call);
      }
    }
  };
  calls();
  const Graph graph(subject.s, calls);
  for (int i = 0; i < launches; ++i) {
    graph.launch(subject.s);
    if (i % 100 == 50) calls();
  }
  subject.finish();
  require(Rank::fetch(subject.call) == 6u * static_cast<unsigned>(launches + 1 + launches / 100), "calls are missing");
  return std::to_string(launches) + " replays";
}

/// One rank's side of sums.
struct SumSubject {
  static constexpr std::size_t most = most_bytes / sizeof(float);

  explicit SumSubject(Rank& on, std::chrono::milliseconds deadline = 15s)
      : site(on),
        plan(pleat::plan_peer_reduce_scatter<pleat::MappedSums>(ranks, most, DType::f32, table)),
        persistent(plan.footprint().persistent),
        out(most * sizeof(float)),
        op(plan, on.open(plan.footprint().symmetric, plan.channels()), persistent.block(), deadline, s),
        errors(on.word()) {
    site.wait(s);
    site.link.meet();
  }
  void write(std::size_t elems, const std::uint32_t* call) {
    fill_terms<<<1, 512, 0, s>>>(reinterpret_cast<float*>(op.input(s)), ranks * elems, site.rank, call);
    check_launch("fill_terms");
  }
  void sum(std::size_t elems, const std::uint32_t* call) {
    auto* const found = reinterpret_cast<float*>(out.data());
    check_cuda(cudaMemsetAsync(found, 0xff, elems * sizeof(float), s), "cudaMemsetAsync");
    op.reduce_scatter(found, DType::f32, elems, false, s);
    compare_sums<<<1, 512, 0, s>>>(found, elems, static_cast<std::size_t>(site.rank) * elems, call, errors);
    check_launch("compare_sums");
  }
  void finish() {
    site.wait(s);
    op.check_sums(s);
    require(Rank::fetch(errors) == 0, "wrong sums");
  }

  Rank& site;
  const CudaStream s;
  pleat::PeerReduceScatterPlan plan;
  pleat::CudaBuffer persistent, out;
  Sums op;
  std::uint32_t* errors;
};

/// Sums of all sizes, by kernels that meet and by streams that do, with and without an input asked for ahead.
std::string sums(Rank& site) {
  const int rounds = repeats(1500);
  constexpr std::size_t sizes[] = {0, 1, 255, 257, 1000, 1024, 1025, 8191, 8192, 8193, SumSubject::most};
  SumSubject subject(site);
  const Numbers numbers(rounds);
  std::mt19937 common(6), own(static_cast<unsigned>(site.rank));
  std::deque<std::size_t> written;
  for (int round = 0; round < rounds; ++round) {
    const int wanted = std::min(rounds, round + 1 + static_cast<int>(common() % 2));
    for (int next = round + static_cast<int>(written.size()); next < wanted; ++next) {
      written.push_back(sizes[common() % std::size(sizes)]);
      subject.write(written.back(), numbers.at(next));
      if (own() % 4 == 0) delay<<<1, 1, 0, subject.s>>>(own() % 60000);
    }
    subject.sum(written.front(), numbers.at(round));
    written.pop_front();
    if (own() % 4 == 0) delay<<<1, 1, 0, subject.s>>>(own() % 60000);
    check_launch("delay");
  }
  subject.finish();
  return std::to_string(rounds) + " sums";
}

/// A graph of sums of both kinds, which is captured before any other, and sums in between.
std::string sum_replays(Rank& site) {
  const int launches = repeats(500);
  SumSubject subject(site);
  std::uint32_t* const call = site.word();
  const auto calls = [&] {
    for (const std::size_t elems : {std::size_t{1000}, SumSubject::most, std::size_t{8191}, std::size_t{1001}}) {
      subject.write(elems, call);
      subject.sum(elems, call);
      next_call<<<1, 1, 0, subject.s>>>(call);
    }
  };
  const Graph graph(subject.s, calls);
  for (int i = 0; i < launches; ++i) {
    graph.launch(subject.s);
    if (i % 100 == 50) calls();
  }
  subject.finish();
  require(Rank::fetch(call) == 4u * static_cast<unsigned>(launches + launches / 100), "calls are missing");
  return std::to_string(launches) + " replays";
}

/// A peer that does not come: the kernel ends, and its status names the peer.
std::string absent(Rank& site) {
  Subject subject(site, 50ms);
  if (site.rank == 0) {
    (void)subject.gather(1000);
    site.wait(subject.s);
    try {
      subject.op.check_stores(subject.s);
      throw std::runtime_error("no time-out was reported");
    } catch (const pleat::comm_error& e) {
      const std::string text = "pleat[C27]: in store_blocks_kernel, rank 0 of the window waited too long for rank 1";
      require(std::string(e.what()).find(text) == 0, e.what());
    }
  }
  return "";
}
std::string absent_from_sum(Rank& site) {
  SumSubject subject(site, 50ms);
  if (site.rank == 0) {
    (void)subject.op.input(subject.s);
    subject.op.reduce_scatter(subject.out.data(), DType::f32, 100, false, subject.s);
    site.wait(subject.s);
    try {
      subject.op.check_sums(subject.s);
      throw std::runtime_error("no time-out was reported");
    } catch (const pleat::comm_error& e) {
      const std::string text = "pleat[C27]: in meet_and_sum_kernel, rank 0 of the window waited too long for rank 1";
      require(std::string(e.what()).find(text) == 0, e.what());
    }
  }
  return "";
}

constexpr Case cases[] = {
    {"calls in any order", calls},          {"graph replays", replays}, {"ordered sums", sums},
    {"graph replays of sums", sum_replays}, {"an absent peer", absent}, {"a peer absent from a sum", absent_from_sum},
};

}  // namespace

int main(int argc, char** argv) {  // [<name of a way>]
  return run_all(cases, all_ways, argc > 1 ? argv[1] : nullptr);
}
