#!/usr/bin/env python3
"""pleat as a package of Conan 2 or vcpkg, and a consumer that finds it. Exit code 77 where the program is not installed.

Run: managers.py conan|vcpkg <source> <work> <compiler>. vcpkg takes the ports that its own need from VCPKG_ROOT.
"""
import os
import pathlib
import re
import shutil
import subprocess
import sys

MANAGER, (SOURCE, WORK), COMPILER = sys.argv[1], map(pathlib.Path, sys.argv[2:4]), sys.argv[4]
CONSUMER = pathlib.Path(__file__).resolve().parent / "consumer"
VERSION = ".".join(re.findall(r"^#define PLEAT_VERSION_\w+ (\d+)$", (SOURCE / "include/pleat/version.hpp").read_text(), re.M))


def run(*arguments, **variables):
    command = [str(a) for a in arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=WORK,
                          env={**os.environ, "CXX": COMPILER, **{name: str(value) for name, value in variables.items()}})
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{done.stdout}")


def consume(**definitions):
    run("cmake", "-S", CONSUMER, "-B", WORK / "consumer", "-G", "Ninja", "-DHOW=package", f"-DVERSION={VERSION}",
        "-DCMAKE_BUILD_TYPE=Release", *(f"-D{name}={value}" for name, value in definitions.items()))
    run("cmake", "--build", WORK / "consumer")
    run(WORK / "consumer/consumer")
    print(f"accepted: a package of {MANAGER}")


def conan():
    home = {"CONAN_HOME": WORK / "home"}
    run("conan", "profile", "detect", **home)
    run("conan", "create", SOURCE / "cmake/conan", "-s", "compiler.cppstd=20", **home)
    run("conan", "install", "--requires", f"pleat/{VERSION}", "-s", "compiler.cppstd=20", "-g", "CMakeDeps", "-g",
        "CMakeToolchain", "--output-folder", WORK / "found", **home)
    consume(CMAKE_TOOLCHAIN_FILE=WORK / "found/conan_toolchain.cmake")


def vcpkg():
    installed, root = WORK / "installed", pathlib.Path(os.environ["VCPKG_ROOT"])
    folders = [f"--x-install-root={installed}", *(f"--{name}-root={WORK / name}" for name in
                                                  ("x-buildtrees", "x-packages", "downloads"))]
    run("vcpkg", "install", "pleat", f"--overlay-ports={SOURCE / 'cmake/vcpkg'}", *folders)
    consume(CMAKE_TOOLCHAIN_FILE=root / "scripts/buildsystems/vcpkg.cmake", VCPKG_INSTALLED_DIR=installed,
            VCPKG_MANIFEST_MODE="OFF")


if not shutil.which(MANAGER) or MANAGER == "vcpkg" and "VCPKG_ROOT" not in os.environ:
    print(f"skipped: {MANAGER} is not installed" + (", or VCPKG_ROOT is not set" if MANAGER == "vcpkg" else ""))
    sys.exit(77)
shutil.rmtree(WORK, ignore_errors=True)
WORK.mkdir(parents=True)
{"conan": conan, "vcpkg": vcpkg}[MANAGER]()
