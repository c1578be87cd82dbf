// What pleat needs of a compiler, and the two macros for what only the compiler knows: which code is for both sides of
// a CUDA program, and what may run at compile time.
#pragma once

#if __cplusplus < 202002L
#error "pleat needs C++20: compile with -std=c++20"
// Ends the compilation here: g++ goes on after #error, and takes minutes and all memory to make sense of the rest.
#include <pleat needs C++20: compile with -std=c++20>
#endif

#if !defined(__cpp_exceptions) && !defined(__CUDA_ARCH__)
#error "pleat needs exceptions: compile without -fno-exceptions"
#include <pleat needs exceptions: compile without -fno-exceptions>
#endif

#if defined(__FAST_MATH__) || defined(__ASSOCIATIVE_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
#error "pleat needs NaN, infinity and sums in order: compile without -ffast-math, -Ofast and -ffinite-math-only"
#endif

#if defined(__CUDACC__)
#define PLEAT_HD __host__ __device__
#else
#define PLEAT_HD
#endif

// For functions that use vectors: those of _GLIBCXX_DEBUG are not literal in C++20, others are.
#if defined(_GLIBCXX_DEBUG)
#define PLEAT_VECTOR_CONSTEXPR inline
#else
#define PLEAT_VECTOR_CONSTEXPR constexpr
#endif
