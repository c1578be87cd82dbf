// LauncherEnvironment: what torchrun, Open MPI and Slurm say, what overrides it, and what is missing or wrong (C25).
#include <map>

#include <pleat/comm/launcher.hpp>

#include <doctest/doctest.h>

namespace {

using Variables = std::map<std::string, std::string>;

pleat::LauncherEnvironment parsed(const Variables& variables) {
  return pleat::LauncherEnvironment::from([&](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  });
}
std::string error_of(const Variables& variables) {
  try {
    parsed(variables);
  } catch (const pleat::comm_error& e) {
    return e.what();
  }
  return "no error";
}
Variables with(Variables variables, const Variables& more) {
  for (const auto& [name, value] : more) variables[name] = value;
  return variables;
}
bool contains(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

const Variables torchrun{{"RANK", "5"},           {"WORLD_SIZE", "8"},      {"LOCAL_RANK", "1"},
                         {"MASTER_ADDR", "gpu0"}, {"MASTER_PORT", "29500"}, {"TORCHELASTIC_RUN_ID", "run7"}};
const Variables open_mpi{{"OMPI_COMM_WORLD_RANK", "3"},
                         {"OMPI_COMM_WORLD_SIZE", "4"},
                         {"OMPI_COMM_WORLD_LOCAL_RANK", "3"},
                         {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
                         {"OMPI_MCA_ess_base_jobid", "77"}};
const Variables slurm{{"SLURM_PROCID", "9"},  {"SLURM_NTASKS", "16"}, {"SLURM_LOCALID", "1"},
                      {"SLURM_JOB_ID", "42"}, {"SLURM_STEP_ID", "3"}, {"SLURM_STEP_NODELIST", "gpu[03-05,9]"}};

TEST_CASE("torchrun") {
  const auto found = parsed(torchrun);
  CHECK(std::string(found.launcher) == "torchrun");
  CHECK(found.rank == 5);
  CHECK(found.size == 8);
  CHECK(found.local_rank == 1);
  CHECK(found.address == "gpu0");
  CHECK(found.port == 29501);  // torchrun itself holds MASTER_PORT
  CHECK(found.job == "/run7");
}
TEST_CASE("Open MPI: all ranks on one machine") {
  const auto found = parsed(open_mpi);
  CHECK(std::string(found.launcher) == "Open MPI");
  CHECK(found.rank == 3);
  CHECK(found.size == 4);
  CHECK(found.local_rank == 3);
  CHECK(found.address == "127.0.0.1");
  CHECK(found.port == 29501);
  CHECK(found.job == "/77");
}
TEST_CASE("Slurm") {
  const auto found = parsed(slurm);
  CHECK(std::string(found.launcher) == "Slurm");
  CHECK(found.rank == 9);
  CHECK(found.size == 16);
  CHECK(found.local_rank == 1);
  CHECK(found.address == "gpu03");
  CHECK(found.job == "/42/3");
  CHECK(parsed(with(slurm, {{"SLURM_STEP_NUM_NODES", "1"}})).address == "127.0.0.1");
  CHECK(parsed(with(slurm, {{"SLURM_STEP_NODELIST", "a-b,c"}})).address == "a-b");
  CHECK(parsed(with(slurm, {{"SLURM_STEP_NODELIST", "n[7,9]-ib,x"}})).address == "n7-ib");
  CHECK(parsed(with(slurm, {{"SLURM_STEP_NODELIST", "lone"}})).address == "lone");
  Variables without_list = with(slurm, {{"SLURM_LAUNCH_NODE_IPADDR", "10.0.0.1"}});
  without_list.erase("SLURM_STEP_NODELIST");
  CHECK(parsed(without_list).address == "10.0.0.1");
}
TEST_CASE("the launcher that started the process comes before the one around it") {
  CHECK(parsed(with(slurm, torchrun)).rank == 5);
  CHECK(parsed(with(slurm, open_mpi)).rank == 3);
}
TEST_CASE("PLEAT_ADDR and PLEAT_PORT come first") {
  const auto found = parsed(with(torchrun, {{"PLEAT_ADDR", "other"}, {"PLEAT_PORT", "1234"}}));
  CHECK(found.address == "other");
  CHECK(found.port == 1234);
  CHECK(parsed(with(open_mpi, {{"MASTER_ADDR", "m"}, {"MASTER_PORT", "10"}})).address == "m");
}
TEST_CASE("[C25]: what is missing or wrong is named") {
  CHECK(contains(error_of({}), "pleat[C25]: no launcher is recognized"));
  Variables variables = torchrun;
  variables.erase("WORLD_SIZE");
  CHECK(contains(error_of(variables), "pleat[C25]: WORLD_SIZE is not set"));
  variables = torchrun;
  variables.erase("LOCAL_RANK");
  CHECK(contains(error_of(variables), "pleat[C25]: LOCAL_RANK is not set"));
  variables = torchrun;
  variables.erase("MASTER_ADDR");
  CHECK(contains(error_of(variables), "set PLEAT_ADDR (or MASTER_ADDR)"));
  CHECK(contains(error_of(with(torchrun, {{"RANK", "8"}})), "pleat[C25]: RANK=8; a number from 0 to 7"));
  CHECK(contains(error_of(with(torchrun, {{"RANK", "x"}})), "pleat[C25]: RANK=x"));
  CHECK(contains(error_of(with(torchrun, {{"RANK", "1x"}})), "pleat[C25]: RANK=1x"));
  CHECK(contains(error_of(with(torchrun, {{"WORLD_SIZE", "0"}})), "pleat[C25]: WORLD_SIZE=0"));
  CHECK(contains(error_of(with(torchrun, {{"MASTER_PORT", "65535"}})), "pleat[C25]: MASTER_PORT=65535"));
  CHECK(contains(error_of(with(torchrun, {{"PLEAT_PORT", "0"}})), "pleat[C25]: PLEAT_PORT=0"));
  CHECK(
      contains(error_of(with(open_mpi, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}})), "Open MPI started 4 ranks on several"));
}

}  // namespace
