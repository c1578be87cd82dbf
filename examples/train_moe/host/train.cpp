// The training of a host rank.
#include "train.hpp"

namespace train_moe {

void train_f64(const Groups<pleat::ThreadComm>& groups, Run& run) {
  train<HostBackend, double>(groups, run);
}
#if !defined(PLEAT_TRAIN_MOE_DEMO)
void train_f32(const Groups<pleat::ThreadComm>& groups, Run& run) {
  train<HostBackend, float>(groups, run);
}
#endif

}  // namespace train_moe
