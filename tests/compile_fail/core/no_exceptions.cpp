// expect: pleat needs exceptions: compile without -fno-exceptions
#if !defined(PLEAT_FIXED)
#undef __cpp_exceptions  // as -fno-exceptions leaves it
#endif
#include <pleat/mesh.hpp>

int main() {}
