// budget: 1.8 s over empty.cpp
#include <pleat/fsdp.hpp>
