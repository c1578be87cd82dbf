// The status of an MPI call, as an exception.
#pragma once

#include <mpi.h>

#include <pleat/core/error.hpp>

namespace pleat::inline v0 {

/// Throws what an MPI call returned on a communicator whose errors return; `call` names it. Errors: comm_error C37.
inline void check_mpi(int status, const char* call) {
  if (status == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING + 1] = {};
  int length = 0;
  (void)MPI_Error_string(status, text, &length);
  fail<comm_error>("pleat[C37]: ", call, " failed: ", static_cast<const char*>(text));
}

namespace detail {
/// A communicator over the ranks of `comm`, for messages that nobody else sees; its errors return. Collective. MPI
/// keeps it until MPI_Finalize: freeing it is collective, and what peers have sent on it may not have come.
inline MPI_Comm duplicate(MPI_Comm comm) {
  MPI_Comm copy = MPI_COMM_NULL;
  check_mpi(MPI_Comm_dup(comm, &copy), "MPI_Comm_dup");
  check_mpi(MPI_Comm_set_errhandler(copy, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  return copy;
}
}  // namespace detail

}  // namespace pleat::inline v0
