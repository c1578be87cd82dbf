// budget: 5.2 s over empty.cpp
// needs: cuda_runtime_api.h
#include <pleat/cuda.hpp>
