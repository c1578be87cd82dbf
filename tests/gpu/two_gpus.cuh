// Two ranks with a GPU each, as threads or as processes: their memory mapped by each other, and a signal board each.
// Where there is one GPU alone, threads share it.
#pragma once

#include <pleat/cuda/mapped_peers.hpp>
#include <pleat/cuda/peer_memory.hpp>

#include <algorithm>
#include <barrier>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <sys/socket.h>
#include <unistd.h>

#include <support/copy_now.hpp>

namespace two_gpus {

using namespace std::chrono_literals;
using pleat::check_cuda;
using pleat::CudaEvent;
using pleat::CudaStream;
using pleat::MappedPeers;
using pleat::SignalBoard;

constexpr int ranks = 2;
constexpr std::size_t data_bytes = std::size_t{4} << 20;  // of all windows
constexpr std::size_t flag_bytes = std::size_t{64} << 10;

inline void require(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error(what);
}

inline bool ranks_share_gpu() {
  return pleat::cuda_device_count() == 1;
}

class Link {
 public:
  virtual ~Link() = default;
  virtual void meet() = 0;
  /// The peer's block, mapped here, in exchange for this rank's.
  virtual std::byte* map_peer(int rank, std::byte* mine) = 0;
};

struct ThreadPair {
  std::barrier<> barrier{ranks};
  std::byte* blocks[ranks] = {};
};
class ThreadLink final : public Link {
 public:
  explicit ThreadLink(ThreadPair& pair) : pair_(pair) {}
  void meet() override { pair_.barrier.arrive_and_wait(); }
  std::byte* map_peer(int rank, std::byte* mine) override {
    if (!ranks_share_gpu()) map_devices(rank);
    pair_.blocks[rank] = mine;
    meet();
    return pair_.blocks[1 - rank];
  }

 private:
  void map_devices(int rank) {
    require(!pleat::maps_memory_of(rank, 1 - rank), "the ranks of a new process do not map each other");
    meet();
    if (rank == 0) {
      for (int i = 0; i < 2; ++i) pleat::map_memory_between(std::vector<int>{0, 1});
      require(cudaPeekAtLastError() == cudaSuccess, "what is mapped is left alone");
    }
    meet();
    require(pleat::maps_memory_of(rank, 1 - rank), "the ranks map each other");
  }

  ThreadPair& pair_;
};
class ProcessLink final : public Link {
 public:
  explicit ProcessLink(int socket) : socket_(socket) {}
  void meet() override { (void)swap('.'); }
  std::byte* map_peer(int, std::byte* mine) override {
    cudaIpcMemHandle_t handle = {};
    check_cuda(cudaIpcGetMemHandle(&handle, mine), "cudaIpcGetMemHandle");
    void* peer = nullptr;
    check_cuda(cudaIpcOpenMemHandle(&peer, swap(handle), cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle");
    return static_cast<std::byte*>(peer);
  }

 private:
  template <class T>
  T swap(T mine) {
    require(send(socket_, &mine, sizeof(T), MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof(T)),
            "the other process is gone");
    T theirs = {};
    for (std::size_t got = 0; got < sizeof(T);) {
      const ssize_t n = read(socket_, reinterpret_cast<char*>(&theirs) + got, sizeof(T) - got);
      require(n > 0, "the other process is gone");
      got += static_cast<std::size_t>(n);
    }
    return theirs;
  }

  int socket_;
};

/// One rank's memory, flags and streams.
class Rank {
 public:
  Rank(Link& to_peer, int my_rank)
      : link(to_peer),
        rank(my_rank),
        device_(ranks_share_gpu() ? 0 : my_rank),
        block_(data_bytes + flag_bytes),
        scratch_(64 << 10) {
    check_cuda(cudaMemset(block_.data(), 0, block_.size_bytes()), "cudaMemset");
    check_cuda(cudaMemset(scratch_.data(), 0, scratch_.size_bytes()), "cudaMemset");
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    peer_block_ = link.map_peer(rank, block_.data());
    board = std::make_shared<SignalBoard>(pleat::CudaDriver(), std::vector<int>{0, 1}, rank,
                                          pleat::Block{block_.data() + data_bytes, flag_bytes});
    link.meet();
  }

  /// The next window of `bytes`.
  MappedPeers open(std::size_t bytes, int channels) {
    std::byte* bases[ranks];
    std::uint64_t* flags[ranks];
    for (int r = 0; r < ranks; ++r) {
      std::byte* const block = r == rank ? block_.data() : peer_block_;
      bases[r] = block + used_bytes_;
      flags[r] = reinterpret_cast<std::uint64_t*>(block + data_bytes);
    }
    used_bytes_ += bytes;
    require(used_bytes_ <= data_bytes, "the block is large enough");
    return MappedPeers(board, {{0, 1}, {bases[0], bases[1]}, {flags[0], flags[1]}, channels});
  }
  /// A zeroed word of local device memory.
  std::uint32_t* word() { return reinterpret_cast<std::uint32_t*>(scratch_.data()) + used_words_++; }
  template <class T>
  static T fetch(const T* word) {
    T value = {};
    testing_support::copy_now(&value, word, sizeof(T));
    return value;
  }
  void wait(cudaStream_t s) {
    board->wait(s, 10s, [] {});
  }

  Link& link;
  const int rank;
  std::shared_ptr<SignalBoard> board;

 private:
  pleat::CudaDeviceScope device_;
  pleat::CudaBuffer block_, scratch_;
  std::byte* peer_block_ = nullptr;
  std::size_t used_bytes_ = 0, used_words_ = 0;
};

class Graph {
 public:
  template <class Work>
  Graph(cudaStream_t s, Work work) {
    cudaGraph_t graph = nullptr;
    check_cuda(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    work();
    check_cuda(cudaStreamEndCapture(s, &graph), "cudaStreamEndCapture");
    check_cuda(cudaGraphInstantiate(&graph_, graph, 0), "cudaGraphInstantiate");
    check_cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
    check_cuda(cudaGraphUpload(graph_, s), "cudaGraphUpload");
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph() { (void)cudaGraphExecDestroy(graph_); }
  void launch(cudaStream_t s) const { check_cuda(cudaGraphLaunch(graph_, s), "cudaGraphLaunch"); }

 private:
  cudaGraphExec_t graph_ = nullptr;
};

/// `to` goes on after what `from` has done so far.
inline void order(cudaStream_t to, cudaStream_t from, const CudaEvent& event) {
  check_cuda(cudaEventRecord(event, from), "cudaEventRecord");
  check_cuda(cudaStreamWaitEvent(to, event, 0), "cudaStreamWaitEvent");
}
inline float elapsed_us(const CudaEvent& begin, const CudaEvent& end) {
  float ms = 0;
  check_cuda(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
  return 1000 * ms;
}
template <class Work>
float median_us(Rank& site, cudaStream_t s, int repetitions, Work work) {
  const CudaEvent begin(true), end(true);
  std::vector<float> times;
  for (int i = 0; i < repetitions; ++i) {
    site.link.meet();
    check_cuda(cudaEventRecord(begin, s), "cudaEventRecord");
    work();
    check_cuda(cudaEventRecord(end, s), "cudaEventRecord");
    site.wait(s);
    times.push_back(elapsed_us(begin, end));
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}
inline std::string us(float value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f us", static_cast<double>(value));
  return text;
}

}  // namespace two_gpus
