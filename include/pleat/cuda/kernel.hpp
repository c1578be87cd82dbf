// The attribute of every kernel.
#pragma once

/// Kernels have hidden visibility, so that two shared libraries built for different architectures live in one process.
#define PLEAT_KERNEL __attribute__((visibility("hidden"))) __global__
