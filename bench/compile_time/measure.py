#!/usr/bin/env python3
"""What including a public header costs: processor seconds of a compile, beside the budget.

Each .cpp below this folder is one row, and each .cu, where there is an nvcc. Its first line is `// budget: <seconds> s`, or,
for what it may add to another row, `// budget: <seconds> s over <file>`. A second line `// needs: <header>` leaves the row out where the compiler does not find
that header. Rows are compiled in turn, so that a slow moment hits them alike.
Run: measure.py [--compiler "g++ -I/usr/local/cuda/include"] [--nvcc "nvcc -arch=sm_90a"] [--repeat 11] [--check [--slack 1]]
[<part of a row's name>]...
"""
import argparse
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
INCLUDE = HERE.parents[1] / "include"
NEEDS = re.compile(r"// needs: (\S+)")
BUDGET = re.compile(r"// budget: ([0-9.]+) s(?: over (\S+))?")


class Row:
    def __init__(self, path):
        self.name = path.relative_to(HERE).as_posix()
        found = BUDGET.match(path.read_text())
        if not found:
            sys.exit(f"{self.name}: its first line is not `// budget: <seconds> s [over <file>]`")
        needs = NEEDS.search(path.read_text())
        self.needs = needs[1] if needs else None
        self.path, self.budget, self.base, self.seconds = path, float(found[1]), found[2], []

    def compiler(self, options):
        return (options.nvcc if self.path.suffix == ".cu" else options.compiler).split()

    def can_compile(self, options):
        compiler = self.compiler(options)
        if shutil.which(compiler[0]) is None:
            return False
        if self.needs is None:
            return True
        command = [*compiler, "-E", "-x", "c++", "-o", os.devnull, "-"]
        return subprocess.run(command, input=f"#include <{self.needs}>\n", text=True, capture_output=True).returncode == 0

    def compile(self, options):
        command = [*self.compiler(options), "-std=c++20", "-O0", f"-I{INCLUDE}", "-c", str(self.path), "-o", os.devnull]
        child = subprocess.Popen(command)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode != 0:
            sys.exit(f"{self.name} does not compile")
        self.seconds.append(usage.ru_utime + usage.ru_stime)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiler", default="g++", help="command and flags of the compiler")
    parser.add_argument("--nvcc", default="nvcc -arch=sm_90a", help="the same for .cu")
    parser.add_argument("--repeat", type=int, default=11, help="compiles of each row; the median counts")
    parser.add_argument("--check", action="store_true", help="exit 1 when a row is over its budget")
    parser.add_argument("--slack", type=float, default=1, help="times the budget, for a machine that is busy or slow")
    parser.add_argument("part", nargs="*", help="measure only rows whose name has one of these parts")
    options = parser.parse_args()
    if options.repeat < 1:
        parser.error(f"--repeat {options.repeat}: 1 or more")

    every = [Row(path) for path in sorted([*HERE.rglob("*.cpp"), *HERE.rglob("*.cu")])]
    if unknown := [part for part in options.part if not any(part in row.name for row in every)]:
        parser.error(f"no row's name has {' or '.join(unknown)} in it; the rows are {', '.join(row.name for row in every)}")
    rows = {row.name: row for row in every if row.can_compile(options)}
    asked = [row for row in every if not options.part or any(part in row.name for part in options.part)]
    wanted = [row for row in asked if row.name in rows]
    if not wanted:
        sys.exit(f"nothing was measured: neither `{options.compiler}` nor `{options.nvcc}` compiles a row that was asked for")
    needed = {row.name for row in wanted}
    for row in wanted:
        while row.base:
            if row.base not in rows:
                sys.exit(f"{row.name}: its budget is over {row.base}, which is no row")
            row = rows[row.base]
            needed.add(row.name)

    for _ in range(options.repeat):
        for name in sorted(needed):
            rows[name].compile(options)

    over = 0
    print(f"{'row':<28} {'seconds':>8} {'adds':>8} {'budget':>8}  (medians of {options.repeat}, {options.compiler} -O0)")
    for row in wanted:
        median = statistics.median(row.seconds)
        adds = median - (statistics.median(rows[row.base].seconds) if row.base else 0)
        late = adds > row.budget * options.slack
        over += late
        print(f"{row.name:<28} {median:8.3f} {adds:8.3f} {row.budget:8.3f}  {'OVER' if late else 'ok':<4}"
              f"{' over ' + row.base if row.base else ''}")
    if left_out := [row.name for row in asked if row.name not in rows]:
        print(f"left out, as their compiler or library is not here: {', '.join(left_out)}")
    sys.exit(1 if options.check and over else 0)


if __name__ == "__main__":
    main()
