// budget: 4.4 s over empty.cpp
#include <pleat/estimate.hpp>
