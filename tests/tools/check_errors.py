#!/usr/bin/env python3
"""Every error id of the code is explained in docs/errors.md and occurs in a test. Run: check_errors.py [root]"""
import pathlib
import re
import sys

RAISED = re.compile(r"pleat\[([A-Z][0-9]{2})\]")
EXPLAINED = re.compile(r"^\|\s*`?([A-Z][0-9]{2})`?\s*\|", re.MULTILINE)
TESTED = re.compile(r"\[([A-Z][0-9]{2})\]")
SOURCES = (".hpp", ".cuh", ".cpp", ".cu")


def ids_in(folders, pattern):
    """{id: first file that has it} of the sources under `folders`."""
    found = {}
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.suffix in SOURCES:
                for name in pattern.findall(path.read_text()):
                    found.setdefault(name, path)
    return found


def check(root):
    """All breaches under `root`, one text each."""
    raised = ids_in([root / "include", root / "examples"], RAISED)
    tested = ids_in([root / "tests"], TESTED)
    explained = EXPLAINED.findall((root / "docs" / "errors.md").read_text())
    problems = [f"{name}: raised in {path.relative_to(root)}, but docs/errors.md has no row for it"
                for name, path in sorted(raised.items()) if name not in explained]
    problems += [f"{name}: raised in {path.relative_to(root)}, but no test names it"
                 for name, path in sorted(raised.items()) if name not in tested]
    problems += [f"{name}: docs/errors.md explains it, but nothing raises it"
                 for name in sorted(set(explained) - set(raised))]
    problems += [f"{name}: {explained.count(name)} rows in docs/errors.md"
                 for name in sorted(set(explained)) if explained.count(name) > 1]
    return problems


if __name__ == "__main__":
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parents[2])
    found = check(root)
    print("\n".join(found) if found else "every error id is explained and tested")
    sys.exit(1 if found else 0)
