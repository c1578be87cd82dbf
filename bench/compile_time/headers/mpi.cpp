// budget: 6.2 s over empty.cpp
// needs: mpi.h
#include <pleat/mpi.hpp>
