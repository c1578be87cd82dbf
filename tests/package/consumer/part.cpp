// A part of a program with a version of pleat of its own; compiled once for each.
#include <pleat/comm.hpp>

#include <typeinfo>

const char* PART() {
  pleat::run_ranks(2, [](pleat::ThreadComm& world) { world.barrier({}); });
  return typeid(pleat::ThreadComm).name();
}
