#!/usr/bin/env python3
"""What the attention kernels take of a multiprocessor, as the compiler reports it: registers a thread, bytes of spills
and of static shared memory. Exit code 1 when one of them spills.

Run: kernel_resources.py [--nvcc <compiler>] [--arch <name, sm_90a>]
"""
import argparse
import pathlib
import re
import subprocess
import sys
import tempfile

INCLUDE = pathlib.Path(__file__).resolve().parents[2] / "include"
UNIT = """#include <pleat/attention/cuda/leaf.cuh>
int main() { pleat::attention_leaf<pleat::cuda_device>::preload(); }
"""


def report(nvcc, arch):
    """What ptxas says of each kernel that the unit uses."""
    with tempfile.TemporaryDirectory() as folder:
        unit = pathlib.Path(folder) / "kernels.cu"
        unit.write_text(UNIT)
        command = [nvcc, "-std=c++20", f"-arch={arch}", f"-I{INCLUDE}", "-Xptxas=-v", "-cubin", "-o", f"{folder}/cubin", unit]
        compiled = subprocess.run(command, capture_output=True, text=True)
    if compiled.returncode != 0:
        sys.exit(compiled.stderr)
    return compiled.stderr


def kernels(text):
    """Mangled name, registers, bytes of spills (stores, loads) and of static shared memory."""
    pattern = (r"Function properties for (\S+)\s+\d+ bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
               r".*?Used (\d+) registers(?:[^\n]*?(\d+) bytes smem)?")
    return [(name, int(registers), int(stores), int(loads), int(shared or 0))
            for name, stores, loads, registers, shared in re.findall(pattern, text, re.S)]


def readable(names):
    """Demangled, without namespaces and arguments."""
    text = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    return [re.sub(r"\w*::|^void ", "", line).partition(">(")[0] + ">" for line in text.splitlines()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--nvcc", default="nvcc")
    parser.add_argument("--arch", default="sm_90a")
    options = parser.parse_args()
    rows = kernels(report(options.nvcc, options.arch))
    if not rows:
        sys.exit("the compiler reports no kernel")
    print(f"{'kernel':74} {'registers':>9} {'spills':>8} {'shared':>6}")
    for name, (_, registers, stores, loads, shared) in sorted(zip(readable([row[0] for row in rows]), rows)):
        print(f"{name:74} {registers:9} {stores:4}{loads:4} {shared:6}")
    spilling = sum(stores + loads > 0 for _, _, stores, loads, _ in rows)
    print(f"{options.arch}: {len(rows)} kernels, {spilling} of them spill")
    sys.exit(1 if spilling else 0)
