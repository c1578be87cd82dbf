# What pleat's own programs are compiled with; private to them, so no user of pleat::pleat sees a flag.
# The presets of developers make warnings errors (CMAKE_COMPILE_WARNING_AS_ERROR); the demo, for any compiler, does not.
add_library(pleat_warnings INTERFACE)
set(warnings -Wall -Wextra -Wpedantic -Wshadow)
set(cuda_warnings -std=c++20 -Xcompiler=-Wall,-Wextra) # CMake 3.25 cannot ask nvcc for C++20
target_compile_options(pleat_warnings INTERFACE "$<$<COMPILE_LANG_AND_ID:CXX,GNU,Clang>:${warnings}>"
                                                "$<$<COMPILE_LANG_AND_ID:CUDA,NVIDIA>:${cuda_warnings}>")
