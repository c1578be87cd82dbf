// Umbrella: users' tensors.
#pragma once

#include <pleat/tensor/dlpack.hpp>
#include <pleat/tensor/tensor_ref.hpp>
#include <pleat/tensor/tensor_traits.hpp>
