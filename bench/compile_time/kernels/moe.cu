// budget: 35 s over kernels/empty.cu
#include <pleat/moe/cuda/leaf.cuh>
