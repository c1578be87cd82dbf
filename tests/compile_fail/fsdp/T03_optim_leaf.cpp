// expect: pleat[T03]: no optimizer leaves for this device: include pleat/optim/host/leaf.hpp
#include <pleat/core/host/executor.hpp>
#include <pleat/optim/adamw.hpp>
#ifdef PLEAT_FIXED
#include <pleat/optim/host/leaf.hpp>
#endif

int main() {
  auto adamw = pleat::optim::bind(pleat::optim::AdamwPlan{}, pleat::HostExecutor{}, pleat::Memory<>{});
  adamw.step({}, nullptr, 0.1, {});
}
