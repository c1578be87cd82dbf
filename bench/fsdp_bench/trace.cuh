// When each part of a step ran: spans between timing events, as lines of JSON; and ranges for profilers.
#pragma once

#include <cstdio>
#include <deque>
#include <memory>
#include <string>

#include <nvtx3/nvToolsExt.h>

#include <pleat/cuda/executor.hpp>

namespace fsdp_bench {

/// What the host enqueues while this lives, as a range of NVTX.
class Range {
 public:
  explicit Range(const std::string& name) { nvtxRangePushA(name.c_str()); }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;
  ~Range() { nvtxRangePop(); }
};

class Trace {
 public:
  void begin(const char* lane, std::string label, cudaStream_t s) {
    Span& span = spans_.emplace_back(lane, std::move(label));
    pleat::check_cuda(cudaEventRecord(span.begin, s), "cudaEventRecord");
  }
  /// Of the newest span of the lane.
  void end(const std::string& lane, cudaStream_t s) {
    for (auto span = spans_.rbegin(); span != spans_.rend(); ++span) {
      if (lane == span->lane) return pleat::check_cuda(cudaEventRecord(span->end, s), "cudaEventRecord");
    }
  }
  void clear() { spans_.clear(); }
  /// Times in microseconds since the start of the first span; after all of it is done.
  void write(const std::string& path) const {
    std::FILE* const file = std::fopen(path.c_str(), "w");
    if (file == nullptr) return;
    const auto since_first = [&](const pleat::CudaEvent& event) {
      float ms = 0;
      pleat::check_cuda(cudaEventElapsedTime(&ms, spans_.front().begin, event), "cudaEventElapsedTime");
      return static_cast<double>(ms) * 1000;
    };
    for (const Span& span : spans_) {
      std::fprintf(file, "{\"lane\":\"%s\",\"label\":\"%s\",\"begin_us\":%.2f,\"end_us\":%.2f}\n", span.lane,
                   span.label.c_str(), since_first(span.begin), since_first(span.end));
    }
    std::fclose(file);
  }

 private:
  struct Span {
    Span(const char* on, std::string text) : lane(on), label(std::move(text)) {}
    const char* lane;
    std::string label;
    pleat::CudaEvent begin{true}, end{true};
  };
  std::deque<Span> spans_;
};

/// An executor that traces the copies of gathers, and on the stream of sums what lies between the wait for a gradient
/// and the record of its sum.
class TracingExecutor : public pleat::CudaExecutor {
 public:
  TracingExecutor(std::shared_ptr<Trace> trace, cudaStream_t reduce) : trace_(std::move(trace)), reduce_(reduce) {}

  void record(const pleat::CudaEvent& event, cudaStream_t s) const {
    if (s == reduce_) trace_->end("reduce", s);
    CudaExecutor::record(event, s);
  }
  void wait(cudaStream_t s, const pleat::CudaEvent& event) const {
    CudaExecutor::wait(s, event);
    if (s == reduce_) trace_->begin("reduce", "", s);
  }
  void copy(void* out, const void* in, std::size_t bytes, cudaStream_t s) const {
    const char* const lane = is_own(out) ? "own" : "gather";
    trace_->begin(lane, "", s);
    CudaExecutor::copy(out, in, bytes, s);
    trace_->end(lane, s);
  }

 private:
  static bool is_own(const void* out) {
    cudaPointerAttributes attributes = {};
    int device = 0;
    pleat::check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    return cudaPointerGetAttributes(&attributes, out) == cudaSuccess && attributes.device == device;
  }

  std::shared_ptr<Trace> trace_;
  cudaStream_t reduce_;
};

}  // namespace fsdp_bench
