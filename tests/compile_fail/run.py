#!/usr/bin/env python3
"""Compiles one compile-fail case twice: it must fail as its first lines say, and compile with -DPLEAT_FIXED.

The case begins with `// expect: <text>`, which the first line with `error:` contains, and may go on with
`// values: <text>`, which stands somewhere in the diagnostics. Run: run.py <case> <compiler> <flag>...
"""
import os
import re
import subprocess
import sys


def compile_case(command):
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    return done.returncode == 0, done.stdout + done.stderr


def breaches(case, command):
    with open(case) as source:
        head = source.read().split("\n", 2)[:2]
    expect = re.fullmatch(r"// expect: (.+)", head[0])
    values = re.fullmatch(r"// values: (.+)", head[1])
    if not expect:
        return ["the first line is not `// expect: <text>`"]

    found = []
    compiles, output = compile_case(command)
    errors = [line for line in output.splitlines() if "error:" in line]
    if compiles:
        found.append("it compiles")
    elif not errors or expect[1] not in errors[0]:
        found.append(f"the first line with `error:` does not contain `{expect[1]}`")
    if values and values[1] not in output:
        found.append(f"the diagnostics do not contain `{values[1]}`")
    if found:
        found.append(output)

    compiles, output = compile_case([*command, "-DPLEAT_FIXED"])
    if not compiles:
        found += ["the twin with -DPLEAT_FIXED does not compile", output]
    return found


if __name__ == "__main__":
    case, *command = sys.argv[1:]
    found = breaches(case, [*command, case])
    print("\n".join([f"{case}:", *found]) if found else f"{case}: fails as it says, and its twin compiles")
    sys.exit(1 if found else 0)
