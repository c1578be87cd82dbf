// budget: 15 s over kernels/empty.cu
#include <pleat/optim/cuda/leaf.cuh>
