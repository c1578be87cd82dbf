// budget: 4.8 s over empty.cpp
#include <pleat/pleat.hpp>
