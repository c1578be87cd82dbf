#!/usr/bin/env python3
"""The house rules: who may include whom, and the few rules of form that each header keeps. Run: check_includes.py [root]"""
import pathlib
import re
import sys

# The one list of allowed arrows. A name is a folder of include/pleat, or one file of it; a folder may include itself.
ARROWS = {
    "core": [],
    "mesh": ["core", "detail"],
    "tensor": ["core", "detail"],
    "comm": ["core", "detail", "mesh"],
    "cuda": ["core", "detail", "tensor", "comm"],
    "nccl": ["core", "detail", "mesh", "comm", "cuda"],
    "mpi": ["core", "detail", "mesh", "comm"],
    "fsdp": ["core", "detail", "mesh", "tensor", "comm"],
    "attention": ["core", "detail", "mesh", "tensor", "comm"],
    "moe": ["core", "detail", "mesh", "tensor", "comm"],
    "pipeline": ["core", "detail", "mesh", "tensor", "comm"],
    "optim": ["core", "detail", "mesh", "tensor", "comm", "fsdp/layout.hpp", "fsdp/shard_memory.hpp"],
    "estimate": ["core", "detail", "mesh", "tensor", "comm", "fsdp", "attention", "moe", "pipeline", "optim"],
    "checkpoint": ["core", "detail", "mesh", "tensor", "fsdp/layout.hpp", "fsdp/shard_memory.hpp"],
    "detail": ["core"],
}
# Folders of schedules. Their leaves stand in host/ and cuda/, do not communicate, and are never included by a schedule.
SCHEDULES = ["fsdp", "attention", "moe", "pipeline", "optim"]
LEAF_ARROWS = ["core", "detail", "tensor"]
# Where one of these folders may be included, so may its umbrella: it holds no leaf and stays cheap.
LEAFLESS = ["mesh", "tensor"]
BACKENDS = ["cuda", "nccl", "mpi"]

TOP_FOLDERS = ["bench", "cmake", "docs", "examples", "include", "tests"]
MESH_NEVER_INCLUDES = ["string", "iterator", "memory", "ranges"]
MAX_LINES = 500
MAX_TRAINER_LINES = 300

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
STANDARD = re.compile(r"[a-z_]+$")
DEVICE = re.compile(r"(cuda|nccl|cub|thrust|cudnn|cublas|cutlass|cute|nvtx|mpi)", re.IGNORECASE)


def includes(path):
    # A name with blanks is no header: core/config.hpp ends a compilation with one.
    return [(bracket, target) for bracket, target in INCLUDE.findall(path.read_text()) if " " not in target]


def within(target, names):
    return any(target == name or target.startswith(name + "/") for name in names)


def allowed_from(parts):
    """What a header at these path parts below include/pleat may include of pleat, apart from version.hpp."""
    area = parts[0]
    if parts == ("pleat.hpp",):  # the umbrella of the umbrellas
        return [f"{name}.hpp" for name in ARROWS if name not in BACKENDS + ["detail"]] + list(ARROWS)
    if parts[0].removesuffix(".cuh") in BACKENDS:  # the same with kernels
        return [*allowed_from(("pleat.hpp",)), "pleat.hpp", f"{area.removesuffix('.cuh')}.hpp"]
    if parts[0].removesuffix(".hpp") in BACKENDS:  # the umbrella of a backend: all of the host part, and the backend
        return [*allowed_from(("pleat.hpp",)), "pleat.hpp", parts[0].removesuffix(".hpp")]
    if len(parts) == 1:  # an umbrella
        return [name for name in ARROWS if name not in BACKENDS + ["detail"]]
    leaf = parts[1] if len(parts) > 2 and parts[1] in ("host", "cuda") else None
    base = LEAF_ARROWS if leaf and area in SCHEDULES else ARROWS.get(area, [])
    return [area, *base, *(f"{name}.hpp" for name in LEAFLESS if name in base)] + (["cuda"] if leaf == "cuda" else [])


def check_header(header, house):
    parts = header.relative_to(house).parts
    where = "/".join(parts)
    lines = header.read_text().splitlines()
    if "#pragma once" not in lines:
        yield f"{where}: has no `#pragma once`"
    if len(lines) > MAX_LINES:
        yield f"{where}: {len(lines)} lines, more than {MAX_LINES}"
    if len(parts) > 1 and parts[0] not in ARROWS:
        yield f"{where}: the house has no folder {parts[0]}/"
    in_backend = any(part.removesuffix(".hpp") in BACKENDS for part in (*parts[:-1], parts[0]))
    is_schedule = len(parts) == 2 and parts[0] in SCHEDULES

    for quote, target in includes(header):
        if quote == '"':
            yield f'{where}: includes "{target}"; write <pleat/...>'
        elif not target.startswith("pleat/"):
            if parts[0] == "core" and not STANDARD.match(target):
                yield f"{where}: core/ includes only the standard library, not <{target}>"
            elif header.suffix == ".hpp" and not in_backend and DEVICE.match(target):
                yield f"{where}: compiles without a CUDA toolkit, so it cannot include <{target}>"
        else:
            inner = target.removeprefix("pleat/")
            folders = inner.split("/")[:-1]
            if not (house / inner).is_file():
                yield f"{where}: <{target}> does not exist"
            elif inner != "version.hpp" and not within(inner, allowed_from(parts)):
                yield f"{where}: may not include <{target}>"
            elif is_schedule and ("host" in folders or "cuda" in folders):
                yield f"{where}: a schedule never includes a leaf or a backend, as <{target}> is"
            elif header.suffix == ".hpp" and not in_backend and (inner.endswith(".cuh") or set(folders) & set(BACKENDS)):
                yield f"{where}: compiles without a CUDA toolkit, so it cannot include <{target}>"


def check_mesh_closure(house):
    """pleat/mesh.hpp stays cheap: nothing that it reaches includes one of the costly headers."""
    seen, todo = set(), ["mesh.hpp"]
    while todo:
        name = todo.pop()
        if name in seen or not (house / name).is_file():
            continue
        seen.add(name)
        for _, target in includes(house / name):
            if target in MESH_NEVER_INCLUDES:
                yield f"{name}: <pleat/mesh.hpp> reaches it, so it cannot include <{target}>"
            todo.append(target.removeprefix("pleat/"))


def check(root):
    """All breaches under `root`, one text each."""
    house = root / "include" / "pleat"
    problems = []
    for folder in root.iterdir():
        if folder.is_dir() and folder.name not in TOP_FOLDERS + ["build"] and not folder.name.startswith("."):
            problems.append(f"{folder.name}/: not one of the top-level folders {' '.join(TOP_FOLDERS)}")
    for header in sorted(path for path in house.rglob("*") if path.is_file()):
        if header.suffix in (".hpp", ".cuh"):
            problems.extend(check_header(header, house))
        else:
            problems.append(f"{header.relative_to(house)}: a header is .hpp or .cuh")
    problems.extend(check_mesh_closure(house))
    for source in sorted(path for path in (root / "examples").rglob("*") if path.suffix in (".cpp", ".hpp", ".cu", ".cuh")):
        where = source.relative_to(root)
        problems.extend(f"{where}: <{target}> is no public header" for _, target in includes(source)
                        if target.startswith("pleat/detail/"))
        if "train_moe" in where.parts and len(source.read_text().splitlines()) > MAX_TRAINER_LINES:
            problems.append(f"{where}: more than {MAX_TRAINER_LINES} lines")
    return problems


if __name__ == "__main__":
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parents[2])
    found = check(root)
    print("\n".join(found) if found else "the house rules hold")
    sys.exit(1 if found else 0)
