// budget: 1.9 s over empty.cpp
#include <pleat/optim.hpp>
