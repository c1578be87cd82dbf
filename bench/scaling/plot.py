"""A line plot as SVG, without a library."""
import math
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 360, 64, 200, 40, 44
COLORS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#9d755d", "#bab0ac")


def line_plot(title, x_name, y_name, series):
    """`series`: {name: [(x, y), ...]}, x > 0 and on a scale of powers of two; y from 0 on."""
    xs = sorted({x for points in series.values() for x, _ in points})
    top = 1.08 * max(y for points in series.values() for _, y in points)
    first, last = math.log2(xs[0]), math.log2(xs[-1])
    at_x = lambda x: LEFT + (WIDTH - LEFT - RIGHT) * ((math.log2(x) - first) / (last - first) if last > first else 0.5)
    at_y = lambda y: HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * y / top
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="11">',
           f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
           f'<text x="12" y="16" font-size="12">{escape(title)}</text>',
           f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_name)}</text>',
           f'<text x="{LEFT - 8}" y="{TOP - 8}" text-anchor="end">{escape(y_name)}</text>']
    for x in xs:
        out.append(f'<text x="{at_x(x):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{x:g}</text>')
    for tick in _ticks(top):
        out.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at_y(tick):.1f}" y2="{at_y(tick):.1f}" stroke="#ddd"/>'
                   f'<text x="{LEFT - 8}" y="{at_y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for i, (name, points) in enumerate(series.items()):
        color, places = COLORS[i % len(COLORS)], [(at_x(x), at_y(y)) for x, y in sorted(points)]
        out.append(f'<polyline fill="none" stroke="{color}" stroke-width="2" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}"/>')
        out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in places]
        out.append(f'<text x="{WIDTH - RIGHT + 12}" y="{TOP + 14 + 18 * i}" fill="{color}">{escape(name)}</text>')
    return "\n".join(out + ["</svg>", ""])


def _ticks(top):
    step = 10 ** math.floor(math.log10(top))
    step = next(step * f for f in (1, 0.5, 0.2, 0.1) if top / (step * f) >= 4)
    return [i * step for i in range(int(top / step) + 1)]
