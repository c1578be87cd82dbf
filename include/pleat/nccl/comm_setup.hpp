// How an NcclComm comes to be: created with its peers, borrowed, or split off another.
#pragma once

#include <pleat/nccl/comm.hpp>

namespace pleat::inline v0 {

namespace detail {
/// What each rank tells all others before NCCL begins.
struct NcclIntroduction {
  char problem[Message::capacity_bytes] = {};  // what keeps this rank from taking part, a whole error text
  char gpu[sizeof(cudaUUID_t)] = {};
  int device = 0;
  ncclUniqueId id{};  // of rank 0
};

/// Makes `device` current and says what this rank can; its problems become everybody's. One rank needs no NCCL.
inline NcclIntroduction introduce(int rank, int device, bool is_alone) {
  NcclIntroduction mine;
  try {
    if (!is_alone) check_nccl_library();
    check_cuda(cudaSetDevice(device), "cudaSetDevice");
    cudaDeviceProp properties;
    check_cuda(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
    std::memcpy(mine.gpu, &properties.uuid, sizeof mine.gpu);
    mine.device = device;
    if (rank == 0 && !is_alone) check_nccl(ncclGetUniqueId(&mine.id), "ncclGetUniqueId");
  } catch (const error& e) {
    std::strncpy(mine.problem, e.what(), sizeof mine.problem - 1);
  }
  return mine;
}

/// Errors: the first rank's problem, as nccl_error or cuda_error; comm_error C24 when two ranks have the same GPU.
inline void check_introductions(const std::vector<NcclIntroduction>& ranks) {
  for (const NcclIntroduction& rank : ranks) {
    const std::string problem = rank.problem;
    if (problem.starts_with("pleat[C20]")) throw cuda_error(message_of(problem));
    if (!problem.empty()) throw nccl_error(message_of(problem));
  }
  for (std::size_t b = 0; b < ranks.size(); ++b) {
    for (std::size_t a = 0; a < b; ++a) {
      if (std::memcmp(ranks[a].gpu, ranks[b].gpu, sizeof ranks[a].gpu) != 0) continue;
      fail<comm_error>("pleat[C24]: ranks ", a, " and ", b, " share a GPU (device ", ranks[a].device, " of rank ", a,
                       ", device ", ranks[b].device, " of rank ", b,
                       "); NCCL needs one GPU per rank: start fewer ranks, or use the threads of CudaThreadComm");
    }
  }
}
template <class T>
std::string bytes_of(const T& value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof value);
}
}  // namespace detail

inline NcclComm NcclComm::create(std::unique_ptr<JobLink> link, int device, NcclOptions options) {
  const bool is_alone = link == nullptr || link->size() == 1;
  auto rank = std::make_shared<detail::NcclRank>(std::move(link), 0, 1, options.deadline);
  Job& job = rank->job();
  job.enter("init");
  std::vector<int> everybody;
  for (int r = 0; r < job.size(); ++r) everybody.push_back(r);
  const detail::NcclIntroduction mine = detail::introduce(job.rank(), device, is_alone);
  std::vector<detail::NcclIntroduction> all(1, mine);
  if (!is_alone) {
    all.resize(everybody.size());
    const auto texts = job.meet(everybody, Job::first_tag, detail::bytes_of(mine));
    for (std::size_t r = 0; r < all.size(); ++r) {
      if (texts[r].size() == sizeof mine) std::memcpy(&all[r], texts[r].data(), sizeof mine);
    }
  }
  detail::check_introductions(all);
  auto group = std::make_shared<State>(std::move(rank), std::move(everybody), job.rank(), device, 0);
  group->is_world = true;
  if (!is_alone) {
    group->barrier_word = CudaBuffer(sizeof(std::int32_t));
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 1;  // a non-blocking communicator starts a thread for every operation
    group->own = group->owner->add_communicator();
    const ncclResult_t status = ncclCommInitRankConfig(group->own, job.size(), all[0].id, job.rank(), &config);
    group->owner->settle(status, "ncclCommInitRankConfig", group->comm(), group->members);
  }
  return NcclComm(std::move(group));
}

inline NcclComm NcclComm::borrow(ncclComm_t comm, NcclOptions options, std::unique_ptr<JobLink> link) {
  check_nccl_library();
  int rank = 0, size = 1, device = 0;
  check_nccl(ncclCommUserRank(comm, &rank), "ncclCommUserRank");
  check_nccl(ncclCommCount(comm, &size), "ncclCommCount");
  check_nccl(ncclCommCuDevice(comm, &device), "ncclCommCuDevice");
  if (link != nullptr && (link->rank() != rank || link->size() != size)) {
    fail<comm_error>("pleat[C25]: the link has rank ", link->rank(), " of ", link->size(), ", the communicator rank ",
                     rank, " of ", size, "; they must agree");
  }
  std::vector<int> everybody;
  for (int r = 0; r < size; ++r) everybody.push_back(r);
  auto owner = std::make_shared<detail::NcclRank>(std::move(link), rank, size, options.deadline);
  auto group = std::make_shared<State>(std::move(owner), std::move(everybody), rank, device, 0);
  group->borrowed = comm;
  const CudaDeviceScope scope(device);
  group->barrier_word = CudaBuffer(sizeof(std::int32_t));
  return NcclComm(std::move(group));
}

template <class T>
std::vector<T> NcclComm::all_gather_host(const char* operation, const T& mine) {
  static_assert(std::is_trivially_copyable_v<T>);
  enter(operation);
  if (size() == 1) return {mine};
  job().meet(group_->members, group_->tag(512));  // names who does not come, before NCCL waits for it
  const CudaDeviceScope scope(group_->device);
  const CudaStream stream;
  CudaBuffer values(sizeof(T) * static_cast<std::size_t>(size()));
  std::byte* my_place = values.data() + sizeof(T) * static_cast<std::size_t>(rank());
  std::vector<T> all(static_cast<std::size_t>(size()), mine);
  CudaExecutor{}.copy(my_place, &mine, sizeof(T), stream);
  gather(my_place, values.data(), sizeof(T), DType::u8, stream);
  CudaExecutor{}.copy(all.data(), values.data(), values.size_bytes(), stream);
  try {
    wait(stream);
  } catch (...) {
    detail::leak(std::move(values));  // a borrowed communicator is not aborted
    throw;
  }
  return all;
}

inline NcclComm NcclComm::split(int color, int key) {
  const auto choices = all_gather_host("split", std::array<int, 2>{color, key});
  std::vector<int> places;
  for (int r = 0; r < size(); ++r) {
    if (choices[static_cast<std::size_t>(r)][0] == color) places.push_back(r);
  }
  const int first = places.front();  // stands for the color, which NCCL wants not to be negative
  std::stable_sort(places.begin(), places.end(), [&](int a, int b) {
    return choices[static_cast<std::size_t>(a)][1] < choices[static_cast<std::size_t>(b)][1];
  });
  const bool is_alone = places.size() == 1;
  const auto place = static_cast<int>(std::find(places.begin(), places.end(), rank()) - places.begin());
  std::vector<int> members;
  for (const int r : places) members.push_back(group_->members[static_cast<std::size_t>(r)]);
  const std::uint64_t id = State::mix(State::mix(group_->id, ++group_->splits), static_cast<std::uint64_t>(first));
  auto child = std::make_shared<State>(group_->owner, std::move(members), place, group_->device, id);
  if (size() == 1) return NcclComm(std::move(child));
  const CudaDeviceScope scope(group_->device);
  if (!is_alone) child->barrier_word = CudaBuffer(sizeof(std::int32_t));
  child->own = child->owner->add_communicator();
  try {
    settle(ncclCommSplit(group_->comm(), is_alone ? NCCL_SPLIT_NOCOLOR : first, place, child->own, nullptr),
           "ncclCommSplit");
  } catch (...) {
    // A borrowed communicator is not aborted: if it splits in the background, NCCL may still write to the child.
    if (group_->borrowed != nullptr) detail::leak(child);
    throw;
  }
  ncclResult_t status = ncclSuccess;
  if (!is_alone) check_nccl(ncclCommGetAsyncError(child->comm(), &status), "ncclCommGetAsyncError");
  group_->owner->settle(status, "ncclCommSplit", child->comm(), child->members);
  return NcclComm(std::move(child));
}

}  // namespace pleat::inline v0
