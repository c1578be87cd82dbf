#!/usr/bin/env python3
"""Prints what sharding changes in plain.cu; with a Markdown file, checks that it shows just that."""
import difflib
import pathlib
import re
import sys

FOLDER = pathlib.Path(__file__).parent
before, after = ((FOLDER / name).read_text().splitlines() for name in ("plain.cu", "sharded.cu"))
lines = list(difflib.unified_diff(before, after, "plain.cu", "sharded.cu", n=0, lineterm=""))
shown = "\n".join(line for line in lines if not line.startswith("@@"))
if len(sys.argv) < 2:
    print(shown)
else:
    page = pathlib.Path(sys.argv[1]).read_text()
    if shown not in re.findall(r"```diff\n(.*?)\n```", page, re.S):
        sys.exit(f"{sys.argv[1]} does not show the diff of plain.cu and sharded.cu; it is what show_diff.py prints")
