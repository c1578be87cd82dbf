// budget: 1.6 s over empty.cpp
#include <pleat/pipeline.hpp>
