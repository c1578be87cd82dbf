// Umbrella: what a trainer needs and that needs no CUDA toolkit; pleat/estimate.hpp, which plans one, is apart.
#pragma once

#include <pleat/attention.hpp>
#include <pleat/checkpoint.hpp>
#include <pleat/comm.hpp>
#include <pleat/fsdp.hpp>
#include <pleat/mesh.hpp>
#include <pleat/mesh/communicator_plan.hpp>
#include <pleat/moe.hpp>
#include <pleat/optim.hpp>
#include <pleat/pipeline.hpp>
#include <pleat/tensor.hpp>
#include <pleat/version.hpp>
