// budget: 6.8 s over empty.cpp
// needs: nccl.h
#include <pleat/nccl.hpp>
