// CudaThreadComm, its arena and handles on it, through the suites: several ranks on one GPU, and over all GPUs.
#include <pleat/cuda/leaf.cuh>
#include <pleat/cuda/thread_comm.hpp>

#include <conformance/collectives.hpp>
#include <conformance/cuda_threads.hpp>
#include <conformance/exchanges.hpp>
#include <conformance/failures.hpp>
#include <conformance/peer_access.hpp>
#include <conformance/splits.hpp>
#include <conformance/sums.hpp>

#include <doctest/doctest.h>

namespace {

using namespace conformance;

template <class Backend>
void check_all() {
  SUBCASE("collectives") {
    check_collectives<Backend, Whole>();
  }
  SUBCASE("exchanges") {
    check_exchanges<Backend, Whole>();
  }
  SUBCASE("splits") {
    check_splits<Backend>();
  }
  SUBCASE("collectives of handles") {
    check_collectives<Backend, Handle>();
  }
  SUBCASE("exchanges of handles") {
    check_exchanges<Backend, Handle>();
  }
  SUBCASE("rank-ordered sums") {
    check_sums<Backend>();
  }
  SUBCASE("failures") {
    check_failures<Backend>();
  }
  SUBCASE("windows") {
    check_peer_access<Backend>();
  }
  SUBCASE("failures of windows") {
    check_peer_failures<Backend>();
  }
}

TEST_CASE("ranks that share one GPU") {
  check_all<CudaThreads<1>>();
}
TEST_CASE("ranks on all GPUs") {
  if (pleat::cuda_device_count() > 1) check_all<CudaThreads<0>>();
}

}  // namespace
