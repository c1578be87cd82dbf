// budget: 10 s over kernels/empty.cu
#include <pleat/attention/cuda/leaf.cuh>
