// budget: 2.0 s over empty.cpp
#include <pleat/attention.hpp>
