// The rows of comm_bench: every operation at every size beside its floor, and the bars it is held to.
#pragma once

#include <algorithm>
#include <map>

#include "operations.cuh"
#include "peer_operations.cuh"
#include "report.hpp"

namespace comm_bench {

class Bench {
 public:
  /// `threads`: null where ranks are processes.
  Bench(Site& site, PeerOperations& peer, Report& report, pleat::CudaThreadComm* threads)
      : site_(site), peer_(peer), report_(report), threads_(threads) {}

  void run(const std::vector<std::size_t>& sizes) {
    report_.title("bare transfers, all ways at once; bytes: what each rank sends to each other one");
    for (const std::size_t bytes : sizes) bare(bytes);
    report_.title("all_gather; bytes: a rank's block; floor: the bare copy engine");
    for (std::size_t i = 0; i < sizes.size(); ++i) all_gather(sizes[i], copy_us_[i]);
    report_.title("all_to_all; bytes: what each rank sends to each other one; floor: the bare copy engine");
    for (std::size_t i = 0; i < sizes.size(); ++i) all_to_all(sizes[i], copy_us_[i]);
    report_.title("reduce_scatter, fp32; bytes: what each rank keeps; floor: the bare pull-and-add");
    for (const std::size_t bytes : sizes) reduce_scatter(bytes);
    peer_.check();
    latency();
    leaves();
    report_.title("proposed stores; us: all_gather and all_to_all together; floor: the copies");
    propose(ways_us_);
    report_.title("proposed sums; floor: the streams meet");
    propose(sums_us_);
  }

 private:
  double measure(const char* operation, const std::string& way, const Operation& what, std::size_t bytes,
                 double floor_us, const std::vector<Bar>& bars = {}) {
    const double us = site_.measure(std::string(operation) + ", " + way, what, bytes);
    report_.add({operation, way, bytes, us, gb_per_s(bytes * (site_.blocks() - 1), us), floor_us}, bars);
    return us;
  }
  // What the library's table chooses is held to the bars. `ctas` 0: copies.
  static bool is_chosen(std::size_t bytes, int ctas) {
    return pleat::ctas_of(pleat::TransferTable{}.stores, bytes) == ctas;
  }
  static_assert([] {
    for (const pleat::KernelStep& step : pleat::TransferTable{}.stores) {
      if (step.up_to_bytes > most_store_bytes) return false;
      if (step.up_to_bytes != 0 && std::ranges::count(store_ctas, step.ctas) == 0) return false;
    }
    return true;
  }());
  static std::string stores_name(std::size_t i) { return "peer stores, " + std::to_string(store_ctas[i]) + " CTAs"; }
  static std::vector<Bar> bars(std::size_t bytes, int ctas, double copy_us, double nccl_us) {
    if (!is_chosen(bytes, ctas)) return {};
    std::vector<Bar> result{{"NCCL", nccl_us}};
    if (bytes >= 128 * mib) {
      result.push_back({"1.05 (floor + 10)", 1.05 * (copy_us + 10)});
    } else if (bytes >= 8 * mib) {
      result.push_back({"1.10 (floor + 10)", 1.10 * (copy_us + 10)});
    }
    return result;
  }
  static double gb_per_s(std::size_t bytes, double us) { return static_cast<double>(bytes) / us / 1000; }

  /// A wait that comes before its signal is looked at again some microseconds later: means of few trips have two humps.
  void latency() {
    report_.title("signals");
    constexpr int trips = 200, samples = 51;
    const auto round_trip = [&](int) {
      if (site_.rank() > 1) return;
      const int other = 1 - site_.rank();
      if (site_.rank() == 0) site_.peers.signal(other, Site::latency_channel, site_.s);
      site_.peers.await(other, Site::latency_channel, site_.s);
      if (site_.rank() == 1) site_.peers.signal(other, Site::latency_channel, site_.s);
    };
    const double us = site_.measure_plain(trips, round_trip, samples);
    report_.add({"signal", "round trip", 0, us}, {{"15 us", 15}});
  }

  void bare(std::size_t bytes) {
    copy_us_.push_back(measure("transfer", "copy engine", bare_copy(site_, bytes), bytes, 0));
    for (const unsigned ctas : {8u, 32u, 132u}) {
      measure("transfer", "stores, " + std::to_string(ctas) + " CTAs", bare_stores(site_, bytes, ctas), bytes,
              copy_us_.back());
    }
  }

  void all_gather(std::size_t bytes, double floor_us) {
    const char* const name = "all_gather";
    measure(name, "NcclComm", comm_all_gather(site_, site_.world, bytes), bytes, floor_us);
    const double nccl_us = measure(name, "NCCL", nccl_all_gather(site_, bytes), bytes, floor_us);
    measure(name, "NCCL, windows", nccl_window_all_gather(site_, bytes), bytes, floor_us);
    if (threads_ != nullptr) {
      measure(name, "CudaThreadComm", comm_all_gather(site_, *threads_, bytes), bytes, floor_us);
    }
    for (std::size_t i = 0; i < std::size(store_ctas) && bytes <= most_store_bytes; ++i) {
      const int ctas = store_ctas[i];
      ways_us_[bytes][ctas] += measure(name, stores_name(i), peer_.stores_all_gather(i, bytes), bytes, floor_us,
                                       bars(bytes, ctas, floor_us, nccl_us));
    }
    ways_us_[bytes][0] += measure(name, "peer copies", peer_.copies_all_gather(bytes), bytes, floor_us,
                                  bars(bytes, 0, floor_us, nccl_us));
    measure(name, "peer copies, in place", peer_.copies_all_gather_in_place(bytes), bytes, floor_us);
  }
  void all_to_all(std::size_t bytes, double floor_us) {
    const char* const name = "all_to_all";
    measure(name, "NcclComm", comm_all_to_all(site_, site_.world, bytes), bytes, floor_us);
    const double nccl_us = measure(name, "NCCL", nccl_all_to_all(site_, bytes), bytes, floor_us);
    measure(name, "NCCL, windows", nccl_window_all_to_all(site_, bytes), bytes, floor_us);
    if (threads_ != nullptr) {
      measure(name, "CudaThreadComm", comm_all_to_all(site_, *threads_, bytes), bytes, floor_us);
    }
    for (std::size_t i = 0; i < std::size(store_ctas) && bytes <= most_store_bytes; ++i) {
      const int ctas = store_ctas[i];
      ways_us_[bytes][ctas] += measure(name, stores_name(i), peer_.stores_all_to_all(i, bytes), bytes, floor_us,
                                       bars(bytes, ctas, floor_us, nccl_us));
    }
    ways_us_[bytes][0] += measure(name, "peer copies", peer_.copies_all_to_all(bytes), bytes, floor_us,
                                  bars(bytes, 0, floor_us, nccl_us));
  }
  void reduce_scatter(std::size_t bytes) {
    const char* const name = "reduce_scatter";
    double floor_us = 0;
    for (const unsigned ctas : {8u, 32u, 132u}) {
      const double us =
          measure(name, "bare, " + std::to_string(ctas) + " CTAs", bare_sum(site_, bytes, ctas), bytes, 0);
      floor_us = floor_us == 0 ? us : std::min(floor_us, us);
    }
    measure(name, "leaf alone", leaf_sum(site_, bytes), bytes, floor_us);
    measure(name, "NCCL", nccl_reduce_scatter(site_, bytes), bytes, floor_us);
    measure(name, "NcclComm, ordered", comm_ordered_sum(site_, site_.world, bytes), bytes, floor_us);
    for (std::size_t i = 0; i < std::size(sum_ctas); ++i) {
      const int ctas = sum_ctas[i];
      if (ctas != 0 && bytes > most_sum_bytes) continue;
      std::vector<Bar> limits;
      if (bytes >= mib && ctas == pleat::ctas_of(pleat::TransferTable{}.sums, bytes)) {
        limits.push_back({"1.10 floor", 1.10 * floor_us});
      }
      const std::string way = ctas == 0 ? "peer, streams meet" : "peer, " + std::to_string(ctas) + " CTAs";
      sums_us_[bytes][ctas] += measure(name, way, peer_.ordered_sum(i, bytes), bytes, floor_us, limits);
    }
    if (threads_ != nullptr) {
      measure(name, "CudaThreadComm, ordered", comm_ordered_sum(site_, *threads_, bytes), bytes, floor_us);
    }
  }

  /// For every size the way that takes the fewest multiprocessors within 2% of the fastest.
  void propose(const std::map<std::size_t, std::map<int, double>>& table) {
    for (const auto& [bytes, ways] : table) {
      const auto less = [](const auto& a, const auto& b) { return a.second < b.second; };
      const double most_us = 1.02 * std::min_element(ways.begin(), ways.end(), less)->second;
      const auto [ctas, us] =
          *std::find_if(ways.begin(), ways.end(), [&](const auto& w) { return w.second <= most_us; });
      report_.add({"step", ctas == 0 ? "no kernel" : std::to_string(ctas) + " CTAs", bytes, us, gb_per_s(bytes, us),
                   ways.at(0)});
    }
  }

  /// On memory of the GPU, both GPUs at once. Bytes: read and written.
  void leaves() {
    using leaf = pleat::core_leaf<pleat::cuda_device>;
    constexpr std::size_t elems = 64 * mib;
    const pleat::CudaBuffer source(2 * elems * sizeof(float)), target(elems * sizeof(float));
    std::byte* const a = source.data();
    std::byte* const b = target.data();
    report_.title("leaves on local memory; bytes: read and written; floor: the copy");
    double copy_rate = 0;
    const auto row = [&](const char* name, const char* way, std::size_t bytes, auto enqueue) {
      const double us = site_.measure_plain(3, [&](int) { enqueue(); });
      if (copy_rate == 0) copy_rate = static_cast<double>(bytes) / us;
      report_.add({name, way, bytes, us, gb_per_s(bytes, us), static_cast<double>(bytes) / copy_rate});
    };
    fill<<<1024, 256, 0, site_.s>>>(reinterpret_cast<float*>(a), 1, 2 * elems);
    check_launch("fill");
    row("copy", "cudaMemcpyAsync", 2 * elems * 4,
        [&] { check_cuda(cudaMemcpyAsync(b, a, elems * 4, cudaMemcpyDeviceToDevice, site_.s), "cudaMemcpyAsync"); });
    row("cast_copy", "f32 to bf16", elems * 6, [&] { leaf::cast_copy(b, DType::bf16, a, DType::f32, elems, site_.s); });
    row("cast_copy", "bf16 to f32", elems * 6, [&] { leaf::cast_copy(a, DType::f32, b, DType::bf16, elems, site_.s); });
    const void* const floats[] = {a, a + elems * 4};
    const void* const halves[] = {a, a + elems * 2};
    row("sum_ranks", "2 of f32 to f32", elems * 12,
        [&] { leaf::sum_ranks(b, DType::f32, floats, DType::f32, elems, false, site_.s); });
    row("sum_ranks", "2 of bf16 to f32", elems * 8,
        [&] { leaf::sum_ranks(b, DType::f32, halves, DType::bf16, elems, false, site_.s); });
    const pleat::CudaBuffer sum(sizeof(double)), scratch(leaf::sum_of_squares_scratch_bytes);
    row("sum_of_squares", "f32", elems * 4, [&] {
      leaf::sum_of_squares(reinterpret_cast<double*>(sum.data()), a, DType::f32, elems, false, scratch.data(), site_.s);
    });
    row("sum_of_squares", "bf16", elems * 2, [&] {
      leaf::sum_of_squares(reinterpret_cast<double*>(sum.data()), a, DType::bf16, elems, false, scratch.data(),
                           site_.s);
    });
  }

  Site& site_;
  PeerOperations& peer_;
  Report& report_;
  pleat::CudaThreadComm* threads_;
  std::vector<double> copy_us_;                           // of the bare copy engine, per size
  std::map<std::size_t, std::map<int, double>> ways_us_;  // of all_gather and all_to_all; [bytes, CTAs or 0]
  std::map<std::size_t, std::map<int, double>> sums_us_;  // of reduce_scatter
};

}  // namespace comm_bench
