#!/usr/bin/env python3
"""Draws when each part of a step ran, as `fsdp_bench --trace` measured it. Run: timeline.py <trace> <svg> [<title>]"""
import json
import pathlib
import sys

WIDTH, LANE, LEFT, TOP = 1180, 34, 84, 44
LANES = [("compute", "computation"), ("gather", "pushes to the peer"), ("own", "own copies"), ("reduce", "sums")]
COLORS = {"F": "#4c78a8", "B": "#54a24b", "optimizer": "#b279a2", "gather": "#f58518", "own": "#eeca3b", "reduce": "#e45756"}


def color(span):
    if span["lane"] == "compute":
        return COLORS["optimizer" if span["label"] == "optimizer" else span["label"][0]]
    return COLORS[span["lane"]]


def draw(spans, title):
    end = max(span["end_us"] for span in spans)
    scale = (WIDTH - LEFT - 16) / end
    height = TOP + LANE * len(LANES) + 34
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="11">',
           f'<rect width="{WIDTH}" height="{height}" fill="white"/>', f'<text x="12" y="22" font-size="13">{title}</text>']
    for row, (lane, name) in enumerate(LANES):
        y = TOP + row * LANE
        out.append(f'<text x="{LEFT - 8}" y="{y + 16}" text-anchor="end">{name.split()[0]}</text>')
        for span in (s for s in spans if s["lane"] == lane):
            x, width = LEFT + span["begin_us"] * scale, max(0.6, (span["end_us"] - span["begin_us"]) * scale)
            label = span["label"] or lane
            out.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{LANE - 10}" fill="{color(span)}"><title>{label}: '
                       f'{span["begin_us"]:.0f} to {span["end_us"]:.0f} us</title></rect>')
            if width > 22 and span["label"]:
                out.append(f'<text x="{x + width / 2:.1f}" y="{y + 16}" text-anchor="middle" fill="white">{span["label"]}</text>')
    axis = TOP + LANE * len(LANES) + 4
    step = next(s for s in (100, 200, 500, 1000, 2000, 5000, 10000) if end / s < 14)
    for tick in range(0, int(end) + 1, step):
        x = LEFT + tick * scale
        out.append(f'<line x1="{x:.1f}" y1="{TOP - 6}" x2="{x:.1f}" y2="{axis}" stroke="#ddd"/>'
                   f'<text x="{x:.1f}" y="{axis + 14}" text-anchor="middle">{tick / 1000:g} ms</text>')
    return "\n".join(out + ["</svg>", ""])


if __name__ == "__main__":
    lines = pathlib.Path(sys.argv[1]).read_text().splitlines()
    pathlib.Path(sys.argv[2]).write_text(draw([json.loads(line) for line in lines], sys.argv[3] if len(sys.argv) > 3 else ""))
