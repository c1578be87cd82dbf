#!/usr/bin/env python3
"""The program and the output of the README's first screen are those of the first example. Run: check_readme.py"""
import pathlib
import sys

ROOT = pathlib.Path(__file__).parents[2]
MAX_LINES = 20

readme = (ROOT / "README.md").read_text()
program = (ROOT / "examples/01_folded_mesh.cpp").read_text()
program = program[program.index("#include <pleat/"):]
problems = []
if program not in readme:
    problems.append("README.md does not have the program of examples/01_folded_mesh.cpp")
if (ROOT / "examples/01_folded_mesh.out").read_text() not in readme:
    problems.append("README.md does not have the output of examples/01_folded_mesh.out")
if len(program.splitlines()) > MAX_LINES:
    problems.append(f"the program of the README has more than {MAX_LINES} lines")
print("\n".join(problems) or "the README shows what runs")
sys.exit(bool(problems))
