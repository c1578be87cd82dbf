// One program, two shared libraries with pleat's kernels for different GPUs. Prints what each of them does.
#include <cstdio>

#include "part.hpp"

namespace {
void show(const char* name, double (*part)(pleat::DType)) {
  try {
    std::printf("%s: %.0f\n", name, part(pleat::DType::f64));
  } catch (const pleat::cuda_error& e) {  // the very type that the library throws
    std::printf("%s: cuda_error %s\n", name, e.what());
  }
}
}  // namespace

int main() {
  show("sm_80", sm_80);
  show("sm_90a", sm_90a);
  show("sm_80", sm_80);
}
