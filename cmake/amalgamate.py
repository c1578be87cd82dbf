#!/usr/bin/env python3
"""Joins a header of pleat and all headers of pleat that it includes into one file, in the order of inclusion.

Run: amalgamate.py <include folder> <header, such as pleat/pleat.hpp> <output>
"""
import pathlib
import re
import sys

INCLUDE, HEADER, OUTPUT = pathlib.Path(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3])
OURS = re.compile(r"\s*#\s*include\s*<(pleat/[^>]+)>")
seen = set()


def lines_of(header):
    if header in seen:
        return
    seen.add(header)
    yield f"// ---- {header}\n"
    for line in (INCLUDE / header).read_text().splitlines(keepends=True):
        if ours := OURS.match(line):
            yield from lines_of(ours[1])
        elif line.strip() != "#pragma once":
            yield line


version = ".".join(re.findall(r"^#define PLEAT_VERSION_\w+ (\d+)$", (INCLUDE / "pleat/version.hpp").read_text(), re.M))
text = "".join(lines_of(HEADER))
OUTPUT.parent.mkdir(parents=True, exist_ok=True)
OUTPUT.write_text(f"// pleat {version}, Apache-2.0: {HEADER} and the {len(seen) - 1} headers that it includes, in one file.\n"
                  f"#pragma once\n\n{text}")
