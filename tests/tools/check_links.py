#!/usr/bin/env python3
"""Every link of the documentation leads somewhere: a relative one to a file or folder, and what stands behind its # to a heading of
that page, by the name that GitHub gives it. Pages are *.md of the root, docs/ and examples/. Run: check_links.py"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parents[2]
FENCED = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?[^)]*\)")
HEADING = re.compile(r"^#{1,6} +(.*?)[ #]*$", re.MULTILINE)
ELSEWHERE = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)  # https:, mailto:


def anchors(text):
    """The names of a page's headings."""
    made = set()
    for heading in HEADING.findall(FENCED.sub("", text)):
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        count, first = 0, name
        while name in made:
            count += 1
            name = f"{first}-{count}"
        made.add(name)
    return made


def check(root):
    """What is wrong with the links of a tree."""
    problems = []
    for page in sorted([*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("examples/**/*.md")]):
        text = page.read_text()
        for link in LINK.findall(CODE.sub("", FENCED.sub("", text))):
            if ELSEWHERE.match(link):
                continue
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            if not target.exists():
                problems.append(f"{page.relative_to(root)}: {link} leads nowhere: there is no such file")
            elif anchor and target.suffix == ".md" and anchor not in anchors(target.read_text()):
                problems.append(f"{page.relative_to(root)}: {link} leads nowhere: there is no such heading")
    return problems


if __name__ == "__main__":
    found = check(ROOT)
    print("\n".join(found) or "all links lead somewhere")
    sys.exit(bool(found))
