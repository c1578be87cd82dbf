#!/usr/bin/env python3
"""The reference that Doxygen makes of the headers leaves no public symbol without words.

Public is what stands in namespace pleat, outside of namespaces detail, of the kernels, and of the leaves that are the default of a
device, whose contracts are with their primary templates. Documented must be each class, concept, enumeration, function, alias and constant there, and each
public member function. A comment covers the declarations right below it, up to a blank line; a class's comment covers its
fields, enumerators, constructors and member types. Members that implement a concept of the library, and the few that mean the
same in every class, are said once: WORDS. Run: check_reference.py [work folder]. Exit code 77 without Doxygen.
"""
import pathlib
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree

ROOT = pathlib.Path(__file__).parents[2]
WORDS = set("""
    rank size begin end front back empty data dtype device extent stride elems c_str what plan footprint carve carve_saved
    carve_scratch accumulator native status status_words
    split all_gather all_gather_v all_to_all all_to_all_v broadcast exchange barrier wait reduce_scatter all_reduce
    make_event record copy copy_2d zero is_idle
    base signal await reachable open
    send take progress is_lost
    preload cast_copy sum_ranks sum_of_squares gate_up down down_backward gate_up_backward weight_gradient
    append append_to name_of coordinate rank_of group groups shard_group replica_group fits_domain
""".split())
COVERED = {"variable", "typedef", "enumvalue"}  # of a class, by its comment


def undocumented(folder):
    """Places and names of public symbols without a comment of their own or above their group."""
    sources = {}

    def is_covered(place):
        lines = sources.setdefault(place.get("file"), (ROOT / "include" / place.get("file")).read_text().splitlines())
        for line in reversed(lines[: int(place.get("line")) - 1]):
            line = line.strip()
            if line.startswith("///"):
                return True
            if not line or line.endswith(":"):
                return False
        return False

    def has_words(node):
        return any("".join(node.find(part).itertext()).strip() for part in ("briefdescription", "detaileddescription")
                   if node.find(part) is not None)

    def judge(node, name):
        place = node.find("location")
        if place is not None and place.get("file").startswith("pleat/") and not has_words(node) and not is_covered(place):
            return {(place.get("file"), int(place.get("line")), name)}
        return set()

    found = set()
    for path in folder.glob("*.xml"):
        for compound in ElementTree.parse(path).getroot().iter("compounddef"):
            kind, name = compound.get("kind"), compound.findtext("compoundname")
            is_class = kind in ("class", "struct", "union", "concept")
            if not name.startswith("pleat") or "detail" in name or compound.get("prot") in ("private", "protected"):
                continue
            if is_class:
                found |= judge(compound, name)
            own_name = name.split("<")[0].split("::")[-1].strip()
            for member in compound.iter("memberdef"):
                called, what = member.findtext("name"), member.get("kind")
                if member.get("prot") != "public" or what in ("friend", "define") or called in WORDS:
                    continue
                if is_class and (what in COVERED or called == own_name or called.startswith(("~", "operator"))):
                    continue
                found |= judge(member, f"{name}::{called}")
    return sorted(found)


def main(work):
    if not shutil.which("doxygen"):
        print("skipped: doxygen is not installed")
        sys.exit(77)
    work.mkdir(parents=True, exist_ok=True)  # Doxygen makes one level
    settings = (ROOT / "docs/Doxyfile").read_text() + f"\nOUTPUT_DIRECTORY = {work}\nGENERATE_HTML = NO\nINPUT = include/pleat\n"
    done = subprocess.run(["doxygen", "-"], input=settings, cwd=ROOT, capture_output=True, text=True)
    problems = [line for line in done.stderr.splitlines() if "warning:" in line or "error:" in line]
    symbols = undocumented(work / "xml")
    print("\n".join(problems + [f"{file}:{line}: {name} is not documented" for file, line, name in symbols])
          or "every public symbol is documented")
    sys.exit(bool(problems or symbols))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(pathlib.Path(sys.argv[1]).resolve())
    with tempfile.TemporaryDirectory() as folder:
        main(pathlib.Path(folder))
