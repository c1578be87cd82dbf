// expect: pleat[T03]: no Newton-Schulz for this device: include pleat/optim/host/newton_schulz.hpp
#include <pleat/comm/thread_comm.hpp>
#include <pleat/optim/host/muon_leaf.hpp>
#include <pleat/optim/muon.hpp>
#ifdef PLEAT_FIXED
#include <pleat/optim/host/newton_schulz.hpp>
#endif

int main() {
  const pleat::GroupComm<pleat::ThreadComm> alone;
  auto muon = pleat::optim::bind(pleat::optim::MuonPlan{}, pleat::HostExecutor{}, alone, alone, {}, pleat::Memory<>{});
  muon.step(nullptr, 0.1, {});
}
