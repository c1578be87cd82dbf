// run_mpi_process: how a program that mpirun has started runs as one rank of its job.
#pragma once

#include <exception>

#include <pleat/mpi/comm.hpp>

namespace pleat::inline v0 {

namespace detail {
/// MPI as long as it lives, where nobody else has begun it.
class MpiSession {
 public:
  MpiSession() {
    int has_begun = 0;
    check_mpi(MPI_Initialized(&has_begun), "MPI_Initialized");
    if (has_begun != 0) return;
    int given = 0;
    check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &given), "MPI_Init_thread");
    is_own_ = true;
  }
  MpiSession(const MpiSession&) = delete;
  MpiSession& operator=(const MpiSession&) = delete;
  /// After a failure MPI_Finalize might wait for messages that nobody takes.
  ~MpiSession() {
    if (is_own_ && !has_failed_) (void)MPI_Finalize();
  }
  void fail() { has_failed_ = true; }

 private:
  bool is_own_ = false, has_failed_ = false;
};
}  // namespace detail

/// Runs `f(MpiComm& world)` as this process's rank of MPI_COMM_WORLD, with MPI_Init and MPI_Finalize around it where
/// the program has not begun MPI itself. What `f` throws ends the job on all ranks, with its text, and is rethrown here
/// once all ranks have heard of it (or after two seconds), for mpirun kills the others as soon as one process fails.
/// Errors: as MpiComm::create.
template <class F>
void run_mpi_process(F&& f, MpiOptions options = {}) {
  detail::MpiSession session;
  MpiComm world = MpiComm::create(MPI_COMM_WORLD, options);
  const auto end = [&](const char* why) {
    session.fail();
    world.abandon(why);
    world.job().leave_together(std::chrono::seconds(2));
  };
  try {
    f(world);
  } catch (const std::exception& e) {
    end(e.what());
    throw;
  } catch (...) {
    end("an exception that is no std::exception");
    throw;
  }
}

}  // namespace pleat::inline v0
