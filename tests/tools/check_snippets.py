#!/usr/bin/env python3
"""What the documentation shows is true: its C++ blocks compile, programs print what its console blocks say, and draw its
pictures.

Block n of docs/<page>.md that begins with ```cpp is the file <page>.<n>, which a file of tests/snippets includes where the
names that it uses are declared; each is included once. A block that begins with `$ <program> ...` is run, where that program
is among those given, and its lines must be in the output in this order, whatever the blanks; `..` stands for lines left out. Above
each picture, `<!-- drawn by: <program> ... -->` says how it was made; with `--svg <file>` the program draws it again, equal in every byte.

Run: check_snippets.py <work folder> <compiler> [<program>=<path>]... Headers of CUDA are found by CPATH.
"""
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HEADER = re.compile(r"^#include <(pleat/[^>]+)>$", re.MULTILINE)
INCLUDED = re.compile(r'^\s*#include "([a-z_]+\.\d+)"$', re.MULTILINE)


PICTURE = re.compile(r"^!\[[^\]]*\]\((\S+\.svg)\)", re.MULTILINE)
DRAWN_BY = re.compile(r"^<!-- drawn by: (.*) -->\n!\[[^\]]*\]\((\S+\.svg)\)", re.MULTILINE)


def blocks():
    """{name: text} of C++ blocks, and the texts of console blocks with their pages."""
    code, consoles = {}, []
    for page in sorted((ROOT / "docs").glob("*.md")):
        count = 0
        for language, text in BLOCK.findall(page.read_text()):
            if language in ("cpp", "c++"):
                count += 1
                code[f"{page.stem}.{count}"] = text
            elif text.startswith("$ "):
                consoles.append((page.name, text))
    return code, consoles


def uncompiled(code, work, compiler):
    work.mkdir(parents=True, exist_ok=True)
    for name, text in code.items():
        for header in HEADER.findall(text):
            if not (ROOT / "include" / header).exists():
                yield f"docs/{name}: there is no {header}"
        (work / name).write_text(f'#line 1 "docs/{name}"\n{HEADER.sub("", text)}')  # inside of functions
    included = []
    for source in sorted((ROOT / "tests/snippets").glob("*.cpp")):
        names = INCLUDED.findall(source.read_text())
        included += names
        if unknown := [name for name in names if name not in code]:
            yield f"{source.name} includes {' '.join(unknown)}, which no page has"
            continue
        command = [compiler, "-std=c++20", "-fsyntax-only", f"-I{ROOT / 'include'}", f"-I{ROOT / 'tests'}", f"-I{work}", source]
        done = subprocess.run(command, capture_output=True, text=True)
        if "cuda_runtime_api.h" in done.stderr and "No such file" in done.stderr:
            print(f"{source.name}: left out, there is no CUDA toolkit")
        elif done.returncode != 0:
            yield f"{source.name}\n{done.stderr}"
    for name in code:
        if included.count(name) != 1:
            yield f"docs/{name}: included {included.count(name)} times by tests/snippets"


def output_of(command, programs, work):
    """What a command prints, or None where its program is not among those given."""
    program, *arguments = shlex.split(command, comments=True)
    if program not in programs:
        return None
    return subprocess.run([programs[program], *arguments], cwd=work, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout


def untrue(consoles, programs, work):
    for page, text in consoles:
        command, *expected = text.splitlines()
        output = output_of(command[2:], programs, work)
        if output is None:
            continue
        lines = iter([" ".join(line.split()) for line in output.splitlines()])
        for line in expected:
            if line != ".." and " ".join(line.split()) not in lines:
                yield f"{page}: {command[2:]} does not print `{line}` (in this place), but\n{output}"
                break
        else:
            print(f"{page}: {command[2:]}")


def undrawn(programs, work):
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        drawn = {picture: command for command, picture in DRAWN_BY.findall(page.read_text())}
        for picture in PICTURE.findall(page.read_text()):
            if picture not in drawn:
                yield f"{page.name}: nothing says what has drawn {picture}"
            elif output_of(f"{drawn[picture]} --svg picture.svg", programs, work) is not None:
                if (work / "picture.svg").read_bytes() != (page.parent / picture).read_bytes():
                    yield f"{page.name}: {drawn[picture]} draws another {picture}"
                else:
                    print(f"{page.name}: {picture}")


def main(*arguments):
    if len(arguments) < 2:
        sys.exit(f"{len(arguments)} arguments; {__doc__.splitlines()[-1]}")
    work, compiler = pathlib.Path(arguments[0]).resolve(), arguments[1]
    programs = dict(program.partition("=")[::2] for program in filter(None, arguments[2:]))
    for name, path in {"the compiler": compiler, **programs}.items():
        if not shutil.which(path):
            sys.exit(f"{name}: `{path}` is no program; {__doc__.splitlines()[-1]}")
    code, consoles = blocks()
    problems = [*uncompiled(code, work, compiler), *untrue(consoles, programs, work), *undrawn(programs, work)]
    print("\n".join(problems) or f"{len(code)} blocks compile")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main(*sys.argv[1:])
