// The training of a host rank, compiled once for all programs.
#pragma once

#include "../program.hpp"
#include "backend.hpp"

namespace train_moe {

void train_f64(const Groups<pleat::ThreadComm>& groups, Run& run);
/// Not in builds for the demo.
void train_f32(const Groups<pleat::ThreadComm>& groups, Run& run);

}  // namespace train_moe
