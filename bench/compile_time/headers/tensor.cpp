// budget: 0.6 s over empty.cpp
#include <pleat/tensor.hpp>
