// budget: 1.5 s over empty.cpp
#include <pleat/comm.hpp>
