// What MPI tells a process about its job, in place of a launcher's environment: how ranks of NCCL find each other.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <pleat/comm/launcher.hpp>
#include <pleat/mpi/check.hpp>

namespace pleat::inline v0 {

namespace detail {
/// A TCP port of this machine that nobody holds just now; 0 when there is none.
inline int free_port() {
  sockaddr_in6 address{};
  address.sin6_family = AF_INET6;
  socklen_t size = sizeof address;
  const int descriptor = ::socket(AF_INET6, SOCK_STREAM, 0);
  const bool is_bound = descriptor >= 0 && ::bind(descriptor, reinterpret_cast<sockaddr*>(&address), size) == 0 &&
                        ::getsockname(descriptor, reinterpret_cast<sockaddr*>(&address), &size) == 0;
  if (descriptor >= 0) (void)::close(descriptor);
  return is_bound ? ntohs(address.sin6_port) : 0;
}
}  // namespace detail

/// Collective over `comm`, after MPI_Init: rank, size, local rank, and a free port of rank 0, which MPI tells all. MPI
/// is used for nothing else:
///
///     const LauncherEnvironment job = launcher_of(MPI_COMM_WORLD);
///     NcclComm world = NcclComm::create(rendezvous(job, deadline), job.local_rank);
///
/// Errors: comm_error C37.
inline LauncherEnvironment launcher_of(MPI_Comm comm) {
  struct Place {
    char address[MPI_MAX_PROCESSOR_NAME + 1];
    std::int32_t port, local_size;
    std::int64_t job;
  };
  LauncherEnvironment result;
  result.launcher = "MPI";
  check_mpi(MPI_Comm_rank(comm, &result.rank), "MPI_Comm_rank");
  check_mpi(MPI_Comm_size(comm, &result.size), "MPI_Comm_size");
  MPI_Comm machine = MPI_COMM_NULL;
  check_mpi(MPI_Comm_split_type(comm, MPI_COMM_TYPE_SHARED, result.rank, MPI_INFO_NULL, &machine),
            "MPI_Comm_split_type");
  check_mpi(MPI_Comm_rank(machine, &result.local_rank), "MPI_Comm_rank");
  Place first{};
  int length = 0, local_size = 0;
  check_mpi(MPI_Comm_size(machine, &local_size), "MPI_Comm_size");
  check_mpi(MPI_Comm_free(&machine), "MPI_Comm_free");
  check_mpi(MPI_Get_processor_name(first.address, &length), "MPI_Get_processor_name");
  first.port = detail::free_port();
  first.local_size = local_size;
  first.job = std::chrono::system_clock::now().time_since_epoch().count();
  check_mpi(MPI_Bcast(&first, sizeof first, MPI_BYTE, 0, comm), "MPI_Bcast");
  result.address = first.local_size == result.size ? "127.0.0.1" : first.address;
  result.port = first.port;
  result.job = std::to_string(first.job);
  return result;
}

}  // namespace pleat::inline v0
