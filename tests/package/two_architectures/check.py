#!/usr/bin/env python3
"""Two shared libraries with pleat's kernels for different GPUs in one program: each runs kernels of its own, whichever
was loaded first, and throws errors that the program catches by their type.

Run: check.py <include folder> <work folder> <nvcc> [--on-gpu]. With --on-gpu exactly the library for the GPU of this machine
must compute, and the exit code is 77 where there is none; without it what the libraries export is judged.
"""
import pathlib
import re
import subprocess
import sys

INCLUDE, WORK, NVCC = sys.argv[1:4]
HERE, WORK = pathlib.Path(__file__).parent, pathlib.Path(WORK)
ARCHITECTURES = {"sm_80": "8.0", "sm_90a": "9.0"}  # compute capability that it runs on


def run(*command):
    done = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}")
    return done.stdout


def library(architecture):
    path = WORK / f"lib{architecture}.so"
    run(NVCC, "-std=c++20", "-O1", f"-gencode=arch=compute_{architecture[3:]},code={architecture}", "-shared",
        "-Xcompiler=-fPIC,-fvisibility=hidden", f"-I{INCLUDE}", f"-DPART={architecture}", HERE / "part.cu", "-o", path)
    exported = [line for line in run("nm", "-DC", "--defined-only", path).splitlines() if "pleat" in line]
    extra = [line for line in exported if not re.search(r"error|sm_\w+\(pleat::v0::DType\)", line)]
    if extra:
        sys.exit(f"{path.name} exports more than its function and exception types:\n" + "\n".join(extra))
    return path


def main():
    WORK.mkdir(parents=True, exist_ok=True)
    libraries = {name: library(name) for name in ARCHITECTURES}
    for first, second in (("sm_80", "sm_90a"), ("sm_90a", "sm_80")):
        program = WORK / f"{first}_first"
        run("g++", "-std=c++20", f"-I{INCLUDE}", HERE / "main.cpp", libraries[first], libraries[second], f"-Wl,-rpath,{WORK}", "-o", program)
        output = run(program)
        print(f"{first} loaded first:\n{output}", end="")
        if "--on-gpu" not in sys.argv:
            continue
        capability = run("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader").split()[0]
        for name, runs_on in ARCHITECTURES.items():
            found = re.findall(rf"^{name}: (.*)$", output, re.M)
            for text in found:
                if not (text == "1000" if runs_on == capability else "pleat[C20]" in text and "no kernel image" in text):
                    sys.exit(f"{name} on a GPU of compute capability {capability}: {text}")


if __name__ == "__main__":
    if "--on-gpu" in sys.argv and not pathlib.Path("/dev/nvidiactl").exists():
        print("skipped: no GPU")
        sys.exit(77)
    main()
