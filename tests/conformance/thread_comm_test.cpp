// ThreadComm and handles on it, through the communicator suite.
#include <pleat/comm/thread_comm.hpp>

#include <conformance/collectives.hpp>
#include <conformance/exchanges.hpp>
#include <conformance/failures.hpp>
#include <conformance/host_threads.hpp>
#include <conformance/splits.hpp>
#include <conformance/sums.hpp>
#include <pleat/core/host/leaf.hpp>

#include <doctest/doctest.h>

namespace {

using namespace conformance;

TEST_CASE("ThreadComm: collectives") {
  check_collectives<HostThreads, Whole>();
}
TEST_CASE("ThreadComm: exchanges") {
  check_exchanges<HostThreads, Whole>();
}
TEST_CASE("ThreadComm: splits") {
  check_splits<HostThreads>();
}
TEST_CASE("GroupComm over ThreadComm: collectives") {
  check_collectives<HostThreads, Handle>();
}
TEST_CASE("GroupComm over ThreadComm: exchanges") {
  check_exchanges<HostThreads, Handle>();
}

TEST_CASE("GroupComm over ThreadComm: rank-ordered sums") {
  check_sums<HostThreads>();
}
TEST_CASE("ThreadComm: failures") {
  check_failures<HostThreads>();
}

}  // namespace
