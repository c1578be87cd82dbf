// One rank of comm_bench: its memory, and how an operation is timed and its results are checked.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include <pleat/nccl/arena.cuh>

#include "kernels.cuh"

namespace comm_bench {

using pleat::check_cuda;
using pleat::check_launch;

inline constexpr std::size_t kib = std::size_t{1} << 10, mib = kib << 10;

/// What a rank gives and gets, in blocks of the size that each rank sends to each other one.
enum class Shape {
  gather,    // in: a block; out: [ranks] blocks, one of each rank
  to_all,    // in: [ranks] blocks; out: [ranks] blocks, one of each rank
  exchange,  // like gather, without one's own block
  sum        // in: [ranks] blocks; out: a block, the sum over ranks
};

struct Operation {
  Shape shape;
  /// Enqueues the i-th operation of a sample, on Site::s; where its result lies.
  std::function<const std::byte*(int i, const std::byte* in)> enqueue;
  /// Where the i-th input lies; empty: in memory of its own, rotated.
  std::function<std::byte*(int i)> input = {};
  /// Inputs that operations in a row take in turn; 0: each has its own.
  int inputs = 0;
  /// Operations in a row; 0: as many as the size asks for.
  int most_in_a_row = 0;
};

/// How many operations follow each other between two looks at the clock.
inline int in_a_row(std::size_t block_bytes) {
  if (block_bytes <= 64 * kib) return 20;
  if (block_bytes <= mib) return 10;
  return block_bytes <= 8 * mib ? 4 : block_bytes <= 64 * mib ? 2 : 1;
}

class Site {
 public:
  /// `most_block_bytes`: of all operations. `more_window_bytes` stay in the arena for the library's operations.
  Site(pleat::NcclComm& communicator, std::size_t most_block_bytes, std::size_t more_window_bytes)
      : world(communicator),
        arena(world, 3 * blocks() * most_block_bytes + more_window_bytes),
        peers(arena.open(everybody(), 3 * blocks() * most_block_bytes, channels)),
        most_block_bytes_(most_block_bytes),
        in_(std::max(blocks() * most_block_bytes, 256 * mib)),
        out_(2 * blocks() * most_block_bytes),
        flushed_(128 * mib),
        errors_(sizeof(unsigned long long)) {
    check_cuda(cudaMemset(errors_.data(), 0, errors_.size_bytes()), "cudaMemset");
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    meet();
  }

  int rank() const { return world.rank(); }
  int ranks() const { return world.size(); }
  /// The same as a number of blocks.
  std::size_t blocks() const { return static_cast<std::size_t>(ranks()); }
  pleat::Group everybody() const { return pleat::Group{0, pleat::GroupShape{}.append(1, ranks())}; }

  /// Memory for results: [2 operations in turn, ranks, block]; plain, or in a rank's window.
  std::byte* out(int i, std::size_t block_bytes) const {
    return out_.data() + static_cast<std::size_t>(i % 2) * blocks() * block_bytes;
  }
  std::byte* window_out(int of_rank, int i, std::size_t block_bytes) const {
    return peers.base(of_rank) + static_cast<std::size_t>(i % 2) * blocks() * block_bytes;
  }
  /// Memory for inputs [ranks, block] in a rank's window, one at a time.
  std::byte* window_in(int of_rank) const { return peers.base(of_rank) + 2 * blocks() * most_block_bytes_; }

  /// The host's barrier, and the largest of what the ranks bring.
  double meet(double mine = 0) {
    std::string text(sizeof mine, '\0');
    std::memcpy(text.data(), &mine, sizeof mine);
    double largest = mine;
    for (const std::string& theirs : world.job().meet(world.world_ranks(), meeting_tag, text)) {
      double value = 0;
      std::memcpy(&value, theirs.data(), sizeof value);
      largest = std::max(largest, value);
    }
    return largest;
  }

  /// Time of one operation: the median over samples of the slowest rank. All ranks' streams meet right before a sample
  /// and are busy until all of it is enqueued. Inputs are random and new in every sample and not in the cache; the last
  /// results of every sample are checked. Errors: std::runtime_error when one of them is wrong.
  double measure(const std::string& name, const Operation& operation, std::size_t block_bytes) {
    const int samples = block_bytes <= 8 * mib ? 31 : 11;  // short ones differ more
    const std::size_t in_bytes =
        operation.shape == Shape::gather || operation.shape == Shape::exchange ? block_bytes : blocks() * block_bytes;
    int count = in_a_row(block_bytes);
    if (operation.most_in_a_row != 0) count = std::min(count, operation.most_in_a_row);
    const int inputs = operation.inputs == 0 ? count : std::min(count, operation.inputs);
    std::vector<const std::byte*> in(static_cast<std::size_t>(inputs)), results(static_cast<std::size_t>(count));
    std::vector<double> times;
    constexpr int warm_ups = 2;
    for (int sample = 0; sample < warm_ups + samples; ++sample) {
      for (int i = 0; i < inputs; ++i) {
        std::byte* const input =
            operation.input ? operation.input(i) : in_.data() + static_cast<std::size_t>(i) * in_bytes;
        fill<<<grid, threads, 0, s>>>(reinterpret_cast<float*>(input), key(sample, i, rank()), in_bytes / 4);
        check_launch("fill");
        in[static_cast<std::size_t>(i)] = input;
      }
      const auto enqueue = [&](int i) {
        results[static_cast<std::size_t>(i)] = operation.enqueue(i, in[static_cast<std::size_t>(i % inputs)]);
      };
      times.push_back(1000 * meet(time_ms(sample, count, enqueue)) / count);
      for (int i = std::max(0, count - 2); i < count; ++i) {
        check(operation.shape, results[static_cast<std::size_t>(i)], block_bytes, sample, i % inputs);
      }
    }
    unsigned long long wrong = 0;
    check_cuda(cudaMemcpyAsync(&wrong, errors_.data(), sizeof wrong, cudaMemcpyDeviceToHost, s), "cudaMemcpyAsync");
    world.wait(s);
    if (meet(static_cast<double>(wrong)) != 0) {
      throw std::runtime_error(name + " of " + std::to_string(block_bytes) + " bytes: " + std::to_string(wrong) +
                               " wrong elements on rank " + std::to_string(rank()));
    }
    times.erase(times.begin(), times.begin() + warm_ups);
    return median(times);
  }

  /// The same without data: `enqueue(i)` for i below `count`; the time of one.
  template <class Enqueue>
  double measure_plain(int count, Enqueue enqueue, int samples = 11) {
    std::vector<double> times;
    for (int sample = 0; sample < 2 + samples; ++sample) {
      const double time = 1000 * meet(time_ms(sample, count, enqueue)) / count;
      if (sample >= 2) times.push_back(time);
    }
    return median(times);
  }

  static double median(std::vector<double>& times) {
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  }
  /// Time of `count` operations on this rank, once. The ranks' streams meet first; the cache holds nothing of the
  /// inputs, and a delay covers the host's calls: but for the first sample, where a library may set something up that
  /// waits for the device.
  template <class Enqueue>
  double time_ms(int sample, int count, Enqueue enqueue) {
    check_cuda(cudaMemsetAsync(flushed_.data(), 0, flushed_.size_bytes(), s), "cudaMemsetAsync");
    world.wait(s);
    meet();
    if (sample > 0) {
      delay<<<1, 1, 0, s>>>(20000 * static_cast<std::uint64_t>(count) + 20000);
      check_launch("delay");
      pleat::peer_barrier(peers, 0, s);
    }
    check_cuda(cudaEventRecord(begin_, s), "cudaEventRecord");
    for (int i = 0; i < count; ++i) enqueue(i);
    check_cuda(cudaEventRecord(end_, s), "cudaEventRecord");
    world.wait(s);
    float ms = 0;
    check_cuda(cudaEventElapsedTime(&ms, begin_, end_), "cudaEventElapsedTime");
    return static_cast<double>(ms);
  }

  pleat::NcclComm& world;
  pleat::NcclArena arena;
  pleat::MappedPeers peers;
  const pleat::CudaStream s, side;
  static constexpr int latency_channel = pleat::peer_barrier_channels;

 private:
  static constexpr std::uint64_t meeting_tag = pleat::Job::first_tag + 1;
  static constexpr int channels = pleat::peer_barrier_channels + 1;
  static constexpr unsigned grid = 1024, threads = 256;

  std::uint32_t key(int sample, int i, int of_rank) const {
    return static_cast<std::uint32_t>(((sample + 1) * 64 + i) * ranks() + of_rank) * key_step;
  }
  void check(Shape shape, const std::byte* out, std::size_t block_bytes, int sample, int i) {
    const std::size_t elems = block_bytes / 4, mine = static_cast<std::size_t>(rank()) * elems;
    const auto compare = [&](const std::byte* found, std::uint32_t first_key, int terms, std::size_t first) {
      count_errors<<<grid, threads, 0, s>>>(reinterpret_cast<const float*>(found), first_key, terms, first, elems,
                                            reinterpret_cast<unsigned long long*>(errors_.data()));
      check_launch("count_errors");
    };
    if (shape == Shape::sum) return compare(out, key(sample, i, 0), ranks(), mine);
    for (int r = 0; r < ranks(); ++r) {
      if (shape == Shape::exchange && r == rank()) continue;
      compare(out + static_cast<std::size_t>(r) * block_bytes, key(sample, i, r), 1, shape == Shape::to_all ? mine : 0);
    }
  }

  std::size_t most_block_bytes_;
  pleat::CudaBuffer in_, out_, flushed_, errors_;
  const pleat::CudaEvent begin_{true}, end_{true};
};

}  // namespace comm_bench
