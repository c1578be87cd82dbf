// Two parts, two versions of pleat: they work side by side and share no type.
#include <cstring>

const char* one();
const char* two();

int main() {
  return std::strcmp(one(), two()) != 0 ? 0 : 1;
}
