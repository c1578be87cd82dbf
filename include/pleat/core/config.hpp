// The one macro that annotates code for both sides of a CUDA program; it is empty for a plain C++ compiler.
#pragma once

#if defined(__CUDACC__)
#define PLEAT_HD __host__ __device__
#else
#define PLEAT_HD
#endif
