// budget: 0.06 s over empty.cpp
#include <pleat/mesh.hpp>
