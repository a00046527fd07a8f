"""A picture of a simulation, as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from archerfish.simulate.simulation import Outcome

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#666666")
WIDTH = 360
HEIGHT = 220
LEFT = 56
TOP = 40  # of a panel, and of its margins
Line = Sequence[tuple[float, float]]
STYLE = (
    "text{font:12px sans-serif;fill:#333}polyline{fill:none;stroke-width:1.6}.axis{stroke:#999}.grid{stroke:#e4e4e4}"
)


def draw(outcomes: Sequence[Outcome], title: str) -> str:
    """First tokens (the share that came within a time) and the requests in the system over time, a line for each
    policy."""
    first = [first_token_line(outcome) for outcome in outcomes]
    live = [[(at_s, float(count)) for at_s, count, _ in outcome.live] for outcome in outcomes]
    width, height = 2 * (WIDTH + LEFT) + 40, TOP + HEIGHT + 80
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f'<style>{STYLE}</style><rect width="100%" height="100%" fill="#fff"/>',
        f'<text x="{LEFT}" y="20">{escape(title)}</text>',
        panel(LEFT, first, "share of requests / seconds to the first token", is_log=True),
        panel(2 * LEFT + WIDTH, live, "requests in the system / seconds", is_log=False),
    ]
    for number, outcome in enumerate(outcomes):
        x = LEFT + 190 * number
        y = height - 16
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f'<rect x="{x}" y="{y - 9}" width="18" height="4" fill="{colour}"/>')
        hit_rate = outcome.figures()["hit rate"]
        parts.append(f'<text x="{x + 24}" y="{y}">{escape(outcome.policy)}: {hit_rate:.0%} cached</text>')
    return "\n".join([*parts, "</svg>\n"])


def first_token_line(outcome: Outcome) -> Line:
    """Times and the shares of requests that had their first token then, at most 200 points."""
    times = sorted(outcome.first_tokens_s())
    chosen = range(0, len(times), max(1, len(times) // 200))
    return [(max(times[i], 1e-4), (i + 1) / len(times)) for i in chosen] + [(times[-1], 1.0)]


def panel(left: float, lines: Sequence[Line], caption: str, *, is_log: bool) -> str:
    """Axes and lines. is_log: of the horizontal axis."""
    xs, ys = zip(*(point for line in lines for point in line), strict=True)
    low, high = (math.floor(math.log10(min(xs))), math.ceil(math.log10(max(xs)))) if is_log else (0.0, max(xs))
    high, top = max(high, low + 1e-9), max(ys) or 1.0

    def place(x: float, y: float) -> str:
        share = ((math.log10(x) if is_log else x) - low) / (high - low)
        return f"{left + WIDTH * share:.1f},{TOP + HEIGHT * (1 - y / top):.1f}"

    marks = [10.0**power for power in range(int(low), int(high) + 1)] if is_log else [high * i / 4 for i in range(5)]
    parts = []
    for x in marks:
        at, _, bottom = *place(x, 0).split(","), TOP + HEIGHT
        parts.append(f'<line class="grid" x1="{at}" y1="{TOP}" x2="{at}" y2="{bottom}"/>')
        parts.append(f'<text x="{at}" y="{bottom + 16}" text-anchor="middle">{x:.3g}</text>')
    for i in range(5):
        y = TOP + HEIGHT * (1 - i / 4)
        parts.append(f'<line class="grid" x1="{left}" y1="{y}" x2="{left + WIDTH}" y2="{y}"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{top * i / 4:.3g}</text>')
    for number, line in enumerate(lines):
        points = " ".join(place(x, y) for x, y in line)
        parts.append(f'<polyline stroke="{COLOURS[number % len(COLOURS)]}" points="{points}"/>')
    parts.append(f'<text x="{left}" y="{TOP + HEIGHT + 36}">{escape(caption)}</text>')
    return "\n".join(parts)
