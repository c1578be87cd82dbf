// 32 ranks, folded twice: attention sees dp 8 x cp 4, the experts see expert_dp 4 x ep 8.
#include <cstdio>

#include <pleat/pleat.hpp>

using Mesh = pleat::FoldedMesh<1, 8, 4, 8>;  // PP, DP, CP, EP

int main() {
  pleat::run_ranks(Mesh::world_size, [](pleat::ThreadComm& world) {
    const pleat::MeshComms comms(Mesh{}, world);
    const auto cp = comms.get<pleat::Axis::cp>();
    const auto ep = comms.get<pleat::Axis::ep>();
    const pleat::RankValues mine(world, std::vector{100 + world.rank()});
    const pleat::RankValues all(world, std::vector<int>(ep.size()));
    ep.all_gather(mine.data(), all.data(), 1, pleat::DType::i32, {});
    const auto tokens = all.read(world);
    if (world.rank() != 13) return;
    std::printf("rank 13 shares a sequence with ranks %d to %d\n", cp.ranks().front(), cp.ranks().back());
    std::printf("and experts with ranks %d to %d, who have", ep.ranks().front(), ep.ranks().back());
    for (const int n : tokens) std::printf(" %d", n);
    std::printf(" tokens\n");
  });
}
