// The version of pleat: the only copy; CMake reads it from here.
#pragma once

#define PLEAT_VERSION_MAJOR 0
#define PLEAT_VERSION_MINOR 1
#define PLEAT_VERSION_PATCH 0
