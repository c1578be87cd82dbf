// What a launcher (torchrun, Open MPI, Slurm) tells a process about its job, read from environment variables.
#pragma once

#include <cstdlib>
#include <string>
#include <string_view>

#include <pleat/core/error.hpp>

namespace pleat::inline v0 {

/// This process's place in its job, and where rank 0 waits for the others. A plain value.
struct LauncherEnvironment {
  const char* launcher = "";  // the name of what was recognized
  int rank = 0;
  int size = 1;
  int local_rank = 0;   // among the ranks of this machine
  std::string address;  // of rank 0: a host name or a number
  int port = 0;         // rank 0 listens there
  std::string job;      // the launcher's name of this job; strangers have another

  /// Reads variables by `get(name)`, which returns a `const char*`, null when unset, as std::getenv does. Rank, size
  /// and local rank: torchrun's RANK, WORLD_SIZE, LOCAL_RANK; Open MPI's OMPI_COMM_WORLD_*; Slurm's SLURM_PROCID,
  /// SLURM_NTASKS, SLURM_LOCALID. Address: PLEAT_ADDR, MASTER_ADDR, this machine when all ranks are on it, the first of
  /// SLURM_STEP_NODELIST, SLURM_LAUNCH_NODE_IPADDR. Port: PLEAT_PORT, else MASTER_PORT + 1 (torchrun itself holds
  /// MASTER_PORT), else 29501. Errors: comm_error C25 with what is missing or wrong.
  template <class Get>
  static LauncherEnvironment from(Get get);
  static LauncherEnvironment from_process() {
    return from([](const char* name) { return std::getenv(name); });
  }
};

namespace detail {
/// The first host of a Slurm list: "gpu[03-05,9],other" gives "gpu03".
inline std::string first_host(std::string_view list) {
  const std::size_t end = list.find_first_of("[,");
  std::string host(list.substr(0, end));
  if (end == std::string_view::npos || list[end] == ',') return host;
  const std::string_view numbers = list.substr(end + 1);
  host += numbers.substr(0, numbers.find_first_of("-,]"));
  const std::size_t close = numbers.find(']');
  if (close == std::string_view::npos) return host;
  const std::string_view after = numbers.substr(close + 1);
  return host.append(after.substr(0, after.find_first_of("[,")));
}

/// A variable's number within limits, or C25.
template <class Get>
int launcher_number(Get get, const char* name, int least, int most) {
  const char* text = get(name);
  if (text == nullptr) fail<comm_error>("pleat[C25]: ", name, " is not set; the launcher's other variables are");
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  if (end == text || *end != '\0' || value < least || value > most) {
    fail<comm_error>("pleat[C25]: ", name, "=", text, "; a number from ", least, " to ", most, " is needed");
  }
  return static_cast<int>(value);
}

/// The names one launcher uses.
struct LauncherNames {
  const char* launcher;
  const char* rank;
  const char* size;
  const char* local_rank;
  const char* local_size;  // ranks on this machine, where the launcher says so
  const char* job;
  const char* part_of_job;
};
// The first whose rank is set counts: torchrun under Slurm and mpirun under Slurm inherit Slurm's variables.
inline constexpr LauncherNames launchers[] = {
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID", nullptr},
    {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_MCA_ess_base_jobid", nullptr},
    {"Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", nullptr, "SLURM_JOB_ID", "SLURM_STEP_ID"},
};

template <class Get>
std::string rank_0_address(Get get, const LauncherNames& names, int size) {
  for (const char* name : {"PLEAT_ADDR", "MASTER_ADDR"}) {
    if (get(name) != nullptr) return get(name);
  }
  const auto is = [&](const char* name, int value) {
    return name != nullptr && get(name) != nullptr && std::strtol(get(name), nullptr, 10) == value;
  };
  if (size == 1 || is(names.local_size, size) || is("SLURM_STEP_NUM_NODES", 1)) return "127.0.0.1";
  if (get("SLURM_STEP_NODELIST") != nullptr) return first_host(get("SLURM_STEP_NODELIST"));
  if (get("SLURM_LAUNCH_NODE_IPADDR") != nullptr) return get("SLURM_LAUNCH_NODE_IPADDR");
  fail<comm_error>("pleat[C25]: ", names.launcher, " started ", size,
                   " ranks on several machines and says nothing of rank 0's address; set PLEAT_ADDR (or MASTER_ADDR)");
}
}  // namespace detail

template <class Get>
LauncherEnvironment LauncherEnvironment::from(Get get) {
  const detail::LauncherNames* found = nullptr;
  for (const auto& names : detail::launchers) {
    if (found == nullptr && get(names.rank) != nullptr) found = &names;
  }
  if (found == nullptr) {
    fail<comm_error>(
        "pleat[C25]: no launcher is recognized: none of RANK (torchrun), OMPI_COMM_WORLD_RANK (Open MPI) and "
        "SLURM_PROCID (Slurm) is set; start the program with one of them, or set RANK, WORLD_SIZE, "
        "LOCAL_RANK, MASTER_ADDR and MASTER_PORT");
  }
  LauncherEnvironment result;
  result.launcher = found->launcher;
  result.size = detail::launcher_number(get, found->size, 1, 1 << 20);
  result.rank = detail::launcher_number(get, found->rank, 0, result.size - 1);
  result.local_rank = detail::launcher_number(get, found->local_rank, 0, result.size - 1);
  result.address = detail::rank_0_address(get, *found, result.size);
  result.port = 29501;
  if (get("PLEAT_PORT") != nullptr) {
    result.port = detail::launcher_number(get, "PLEAT_PORT", 1, 65535);
  } else if (get("MASTER_PORT") != nullptr) {
    result.port = detail::launcher_number(get, "MASTER_PORT", 1, 65534) + 1;
  }
  for (const char* name : {found->job, found->part_of_job}) {
    if (name != nullptr && get(name) != nullptr) result.job.append("/").append(get(name));
  }
  return result;
}

}  // namespace pleat::inline v0
