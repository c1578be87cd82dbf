#!/usr/bin/env python3
"""Consumers of pleat in every supported way, and the requests that must be refused.

Run: run.py <source> <work> <compiler> <component that this machine has>...
"""
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

SOURCE, WORK, COMPILER = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3]
AVAILABLE = sys.argv[4:]
CONSUMER = pathlib.Path(__file__).parent / "consumer"


def cmake(*arguments):
    done = subprocess.run(["cmake", *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.returncode, done.stdout


def must(*arguments):
    code, output = cmake(*arguments)
    if code != 0:
        sys.exit(f"cmake {' '.join(map(str, arguments))}\n{output}")


def configure(source, build, **variables):
    return ["-S", source, "-B", WORK / build, "-G", "Ninja", f"-DCMAKE_CXX_COMPILER={COMPILER}",
            *(f"-D{name}={value}" for name, value in variables.items())]


def accepted(name, **variables):
    must(*configure(CONSUMER, name, **variables))
    must("--build", WORK / name)
    subprocess.run([WORK / name / "consumer"], check=True)
    print(f"accepted: {name}")


def run(*arguments, **options):
    done = subprocess.run([str(a) for a in arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, arguments))}\n{done.stdout}")
    return done.stdout


def compiled(name, source, *flags):
    run(COMPILER, "-std=c++20", "-Wall", "-Wextra", "-Wpedantic", "-Werror", *source, *flags, "-o", WORK / name)
    run(WORK / name)
    print(f"accepted: {name}")


def refused(name, text, **variables):
    code, output = cmake(*configure(CONSUMER, name, **variables))
    if code == 0 or text not in " ".join(output.split()):
        sys.exit(f"{name}: expected a refusal with `{text}`, got exit code {code} and\n{output}")
    print(f"refused: {name}")


shutil.rmtree(WORK, ignore_errors=True)
NOTHING_BUILT = {"PLEAT_BUILD_TESTS": "OFF", "PLEAT_BUILD_EXAMPLES": "OFF", "PLEAT_BUILD_BENCH": "OFF",
                 "PLEAT_ENABLE_CUDA": "OFF", "CMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit": "ON"}
must(*configure(SOURCE, "pleat", **NOTHING_BUILT))
must("--install", WORK / "pleat", "--prefix", WORK / "first")
accepted("build_tree", HOW="package", CMAKE_PREFIX_PATH=WORK / "pleat")
must("--build", WORK / "pleat", "--target", "pleat_single_header")
compiled("single_header_used", [CONSUMER / "main.cpp"], "-DPLEAT_IN_ONE_FILE", f"-I{WORK / 'pleat/single_header'}")
shutil.rmtree(WORK / "pleat")
(WORK / "first").rename(WORK / "moved")  # an installed tree can be moved

version = ".".join(re.findall(r"^#define PLEAT_VERSION_\w+ (\d+)$", (SOURCE / "include/pleat/version.hpp").read_text(), re.M))
if f'"version": "{version}"' not in (SOURCE / "cmake/vcpkg/pleat/vcpkg.json").read_text():
    sys.exit(f"cmake/vcpkg/pleat/vcpkg.json does not have the version {version}")
major, minor, _ = version.split(".")
package = {"HOW": "package", "CMAKE_PREFIX_PATH": WORK / "moved"}
without_cuda = {**package, "CMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit": "ON"}

accepted("installed", VERSION=version, **package)
accepted("subdirectory", HOW="subdirectory", PLEAT_SOURCE=SOURCE)
accepted("subdirectory_installed", HOW="subdirectory", PLEAT_SOURCE=SOURCE, PLEAT_INSTALL="ON")
accepted("fetched", HOW="fetch", PLEAT_SOURCE=SOURCE)
refused("a_later_major_version", "99", VERSION="99", **package)
refused("another_minor_version", "0.99", VERSION=f"{major}.99", **package)
refused("an_unknown_component", "pleat has no component 'telepathy'; its components: cuda nccl cublaslt cudnn mpi", COMPONENTS="telepathy", **package)
refused("cuda_without_a_toolkit", "component cuda: no CUDA toolkit of version 13", COMPONENTS="cuda", **without_cuda)
refused("nccl_without_a_toolkit", "component nccl: no CUDA toolkit of version 13", COMPONENTS="nccl", **without_cuda)
refused("cublaslt_without_a_toolkit", "component cublaslt: no CUDA toolkit of version 13", COMPONENTS="cublaslt", **without_cuda)
refused("cudnn_without_a_toolkit", "component cudnn: no CUDA toolkit of version 13", COMPONENTS="cudnn", **without_cuda)
refused("mpi_without_one", "component mpi: no MPI was found", COMPONENTS="mpi", CMAKE_DISABLE_FIND_PACKAGE_MPI="ON", **package)
if shutil.which("pkg-config"):
    paths = {**os.environ, "PKG_CONFIG_PATH": str(WORK / "moved/share/pkgconfig")}
    compiled("pkg_config", [CONSUMER / "main.cpp"], *run("pkg-config", "--cflags", "--libs", f"pleat = {version}", env=paths).split())
    # Where packagers give absolute folders: of the headers, of the rest, of both. CMake wants them outside of the source.
    for name, absolute in (("headers", ["INCLUDEDIR"]), ("data", ["DATADIR"]), ("both", ["INCLUDEDIR", "DATADIR"])):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            folders = {f"CMAKE_INSTALL_{folder}": root / "elsewhere" / folder for folder in absolute}
            must(*configure(SOURCE, root / "build", **NOTHING_BUILT, CMAKE_INSTALL_PREFIX=root / "prefix", **folders))
            must("--install", root / "build")
            data = folders.get("CMAKE_INSTALL_DATADIR", root / "prefix/share")
            paths = {**os.environ, "PKG_CONFIG_PATH": str(data / "pkgconfig")}
            flags = run("pkg-config", "--cflags", "--libs", "pleat", env=paths).split()
            headers = folders.get("CMAKE_INSTALL_INCLUDEDIR", root / "prefix/include")
            found = [path for path in flags if path.startswith("-I") and pathlib.Path(path[2:]).resolve() == headers.resolve()]
            if not found or not (headers / "pleat/pleat.hpp").exists():
                sys.exit(f"pkg-config gives {flags}; the headers are in {headers}")
        print(f"accepted: pkg_config with absolute folders of {name}")

# Another version in another part of the same program: its names are its own.
other = WORK / "other_version"
shutil.copytree(SOURCE / "include", other)
for header in other.rglob("*.hpp"):
    header.write_text(header.read_text().replace("inline v0", "inline v1").replace("v0::", "v1::"))
for part, include in (("one", SOURCE / "include"), ("two", other)):
    run(COMPILER, "-std=c++20", f"-DPART={part}", f"-I{include}", "-c", CONSUMER / "part.cpp", "-o", WORK / f"{part}.o")
compiled("two_versions", [WORK / "one.o", WORK / "two.o", CONSUMER / "both_parts.cpp"], "-pthread")

for component in filter(None, AVAILABLE):
    accepted(f"installed_with_{component}", COMPONENTS=component, **package)
    accepted(f"subdirectory_with_{component}", HOW="subdirectory", PLEAT_SOURCE=SOURCE, COMPONENTS=component)
