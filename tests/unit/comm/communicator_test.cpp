// The communicator concept: what satisfies it, what does not, and that nothing over it needs more than it says.
#include <pleat/comm/communicator.hpp>
#include <pleat/comm/group_comm.hpp>
#include <pleat/comm/mesh_comms.hpp>
#include <pleat/comm/ordered_sum.hpp>
#include <pleat/core/host/buffer.hpp>

#include <support/archetype.hpp>

#include <doctest/doctest.h>

namespace {

using namespace pleat;
using testing_support::ArchetypeComm;
using testing_support::ArchetypeStream;
using testing_support::Log;

struct CannotSplit : ArchetypeComm {
  void split(int, int);
};
struct RankMayThrow : ArchetypeComm {
  int rank() const;
  RankMayThrow split(int, int);
};
struct GivesStatus : ArchetypeComm {
  int barrier(ArchetypeStream);
  GivesStatus split(int, int);
};
struct CannotMove : ArchetypeComm {
  CannotMove(CannotMove&&) = delete;
  CannotMove split(int, int);
};
struct Sums : ArchetypeComm {
  Sums split(int, int);
  void reduce_scatter(const void*, void*, std::size_t, DType, ArchetypeStream);
  void all_reduce(void*, std::size_t, DType, ArchetypeStream);
};
static_assert(communicator<ArchetypeComm> && !communicator<CannotSplit> && !communicator<RankMayThrow> &&
              !communicator<GivesStatus> && !communicator<CannotMove> && !communicator<int>);
static_assert(native_reductions<Sums> && !native_reductions<ArchetypeComm>);

const ArchetypeStream s(7);

TEST_CASE("GroupComm hands every argument on") {
  Log log;
  ArchetypeComm comm(log, 1, 3);
  const GroupComm<ArchetypeComm> group(comm, Group{4, GroupShape{}.append(2, 3)});
  CHECK(group.rank() == 1);
  CHECK(group.size() == 3);
  CHECK(group.ranks()[1] == 6);
  CHECK(group.comm() == &comm);
  float in[9] = {}, out[9] = {};
  const std::size_t send[] = {1, 2, 3}, recv[] = {2, 2, 2};
  const Send tx[] = {{in, 1, 0}};
  const Recv rx[] = {{out, 1, 0}, {out, 1, 2}};
  group.all_gather(in, out, 3, DType::f32, s);
  group.all_gather_v(in, out, send, DType::f32, s);
  group.all_to_all(in, out, 2, DType::bf16, s);
  group.all_to_all_v(in, send, out, recv, DType::f32, s);
  group.broadcast(out, 5, 2, DType::i32, s);
  group.exchange(tx, rx, DType::f64, s);
  group.barrier(s);
  CHECK(log == Log{"all_gather 3 f32 on 7", "all_gather_v 2 f32 on 7", "all_to_all 2 bf16 on 7",
                   "all_to_all_v 2 f32 on 7", "broadcast of another 5 i32 on 7", "exchange 12 f64 on 7",
                   "barrier 0 u8 on 7"});
}

TEST_CASE("a group of one works on a device that is not the host") {
  Log log;
  ArchetypeComm comm(log, 0, 1);
  const GroupComm<ArchetypeComm> group(comm);
  const float in[2] = {1, 2};
  float out[2] = {};
  group.all_gather(in, out, 2, DType::f32, s);
  CHECK(out[1] == 2.0f);
  CHECK(log.empty());
}

TEST_CASE("sums need no more than the concept") {
  Log log;
  ArchetypeComm comm(log, 1, 3);
  const GroupComm<ArchetypeComm> group(comm);
  float buffer[7] = {1, 2, 3, 4, 5, 6, 7};
  const HostBuffer scratch(all_reduce_scratch_bytes(7, 3, DType::f32), 0xff);
  all_reduce_ordered(group, buffer, 7, DType::f32, scratch.block(), s);
  const float expected[7] = {1, 2, 3, 12, 15, 6, 7};  // my part, of three ranks that hold the same
  for (int i = 0; i < 7; ++i) CHECK(buffer[i] == expected[i]);
  CHECK(log == Log{"all_to_all_v 2 f32 on 7", "all_gather_v 2 f32 on 7"});
}

TEST_CASE("MeshComms needs no more than the concept") {
  Log log;
  ArchetypeComm world(log, 5, 8);
  const LaneSet lanes = {Lane::main};
  const MeshComms comms(FoldedMesh<2, 2, 2, 2>{}, world, lanes);
  CHECK(comms.get<Axis::cp>().rank() == 1);
  CHECK(comms.get<Axis::cp>().ranks()[0] == 4);
  CHECK(comms.world().size() == 8);
  CHECK(log.size() == static_cast<std::size_t>(plan_communicators(comms.mesh(), 5, lanes).size()));
}

}  // namespace
