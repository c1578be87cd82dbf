// budget: 20 s over kernels/empty.cu
#include <pleat/optim/cuda/muon_leaf.cuh>
