"""Recipe of this checkout: conan create cmake/conan. Consumers get the package's own CMake files: find_package(pleat)."""
import pathlib
import re

from conan import ConanFile
from conan.tools.cmake import CMake, CMakeToolchain
from conan.tools.files import copy, load


class Pleat(ConanFile):
    name = "pleat"
    description = "Parallelism templates for training Mixture-of-Experts models"
    license = "Apache-2.0"
    package_type = "header-library"
    no_copy_source = True
    settings = "os", "compiler", "build_type", "arch"

    @property
    def _root(self):
        return pathlib.Path(self.recipe_folder).resolve().parents[1]

    def set_version(self):
        text = load(self, str(self._root / "include/pleat/version.hpp"))
        self.version = ".".join(re.findall(r"^#define PLEAT_VERSION_\w+ (\d+)$", text, re.M))

    def export_sources(self):
        for pattern in ("CMakeLists.txt", "LICENSE", "include/*", "cmake/*"):
            copy(self, pattern, str(self._root), self.export_sources_folder)

    def package_id(self):
        self.info.clear()

    def generate(self):
        toolchain = CMakeToolchain(self)
        for part in ("TESTS", "EXAMPLES", "BENCH"):
            toolchain.cache_variables[f"PLEAT_BUILD_{part}"] = "OFF"
        toolchain.cache_variables["PLEAT_INSTALL"] = "ON"
        toolchain.cache_variables["PLEAT_ENABLE_CUDA"] = "OFF"
        toolchain.generate()

    def build(self):
        CMake(self).configure()

    def package(self):
        CMake(self).install()

    def package_info(self):
        self.cpp_info.bindirs, self.cpp_info.libdirs = [], []
        self.cpp_info.system_libs = ["pthread"]
        self.cpp_info.set_property("cmake_find_mode", "none")
        self.cpp_info.builddirs = ["share/cmake/pleat"]
