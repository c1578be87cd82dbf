// The functions of both libraries: 1000 where their kernels run, as `dtype` is f64; they throw pleat's errors.
#pragma once

#include <numeric>
#include <vector>

#include <pleat/core/dtype.hpp>

__attribute__((visibility("default"))) double sm_80(pleat::DType dtype);
__attribute__((visibility("default"))) double sm_90a(pleat::DType dtype);
