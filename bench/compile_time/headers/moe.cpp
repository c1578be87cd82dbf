// budget: 1.7 s over empty.cpp
#include <pleat/moe.hpp>
