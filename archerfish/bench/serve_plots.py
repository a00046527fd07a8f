"""The figures of `bench serve` as one HTML file that needs nothing else: inline SVG, readable in light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from archerfish.bench.serve_bench import Found
from archerfish.bench.serve_report import Point, by_load, table
from archerfish.bench.targets import row_of

WIDTH, HEIGHT = 640, 320
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 34, 44
COLOURS = ("#2a78d6", "#d65f2a", "#2e9e62", "#a04fc4", "#b08a00", "#c43f6b")
DASHES = ("", "6 4", "2 3")
STYLE = """
:root { color-scheme: light dark; --text: #1c1f23; --dim: #6b7280; --line: #d9dce1; --back: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --text: #e7e9ec; --dim: #9aa2ad; --line: #3a3f47; --back: #16181c; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); }
body { max-width: 1360px; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; }
td, th { padding: .15rem .8rem; text-align: right; border-bottom: 1px solid var(--line); }
td:first-child, th:first-child { text-align: left; }
.plots { display: flex; flex-wrap: wrap; gap: 1rem; }
svg { width: 100%; max-width: 640px; height: auto; }
svg text { fill: var(--text); font-size: 12px; }
svg .dim { fill: var(--dim); }
.met { color: #2e9e62; }
.missed { color: #d64545; }
.wide { overflow-x: auto; }
"""


@dataclass(frozen=True)
class Series:
    """A line of a chart; points without a value are left out."""

    name: str
    points: Sequence[tuple[float, float | None]]
    colour: int = 0
    dash: int = 0


def ticks(high: float, number: int = 5) -> list[float]:
    """Round numbers from 0 to at least `high`."""
    if not 1e-9 < high < math.inf:
        return [0.0, 1.0]
    raw = high / number
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((factor * power for factor in (1, 2, 2.5, 5) if factor * power >= raw * (1 - 1e-9)), 10 * power)
    return [step * index for index in range(math.ceil(high / step - 1e-9) + 1)]


def chart(title: str, x_label: str, y_label: str, series: Sequence[Series]) -> str:
    """A line chart as SVG, axes from zero."""
    shown = [(one, [(x, y) for x, y in one.points if y is not None and math.isfinite(y)]) for one in series]
    shown = [(one, points) for one, points in shown if points]
    x_ticks = ticks(max((x for _, points in shown for x, _ in points), default=1.0))
    y_ticks = ticks(max((y for _, points in shown for _, y in points), default=1.0))

    def across(x: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * x / x_ticks[-1]

    def up(y: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * y / y_ticks[-1]

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT + 18 * math.ceil(len(shown) / 3)}" role="img"><title>{escape(title)}</title>']
    parts.append(f'<text x="{LEFT}" y="18" font-weight="600">{escape(title)}</text>')
    for y in y_ticks:
        line = f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up(y):.1f}" y2="{up(y):.1f}" stroke="var(--line)"/>'
        parts.append(f'{line}<text class="dim" x="{LEFT - 6}" y="{up(y) + 4:.1f}" text-anchor="end">{y:,g}</text>')
    below = HEIGHT - BOTTOM + 16
    parts += [f'<text class="dim" x="{across(x):.1f}" y="{below}" text-anchor="middle">{x:,g}</text>' for x in x_ticks]
    parts.append(f'<text class="dim" x="{WIDTH - RIGHT}" y="{HEIGHT - 10}" text-anchor="end">{escape(x_label)}</text>')
    parts.append(f'<text class="dim" x="{WIDTH - RIGHT}" y="18" text-anchor="end">{escape(y_label)}</text>')
    for index, (one, points) in enumerate(shown):
        parts.append(line_of(one, [(across(x), up(y)) for x, y in points]))
        parts.append(legend_of(one, LEFT + (index % 3) * 195, HEIGHT + 4 + 18 * (index // 3)))
    return "".join(parts) + "</svg>"


def stroke(one: Series) -> str:
    colour, dash = COLOURS[one.colour % len(COLOURS)], DASHES[one.dash % len(DASHES)]
    return f'stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}" fill="none"'


def line_of(one: Series, places: Sequence[tuple[float, float]]) -> str:
    drawn = f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}" {stroke(one)}/>'
    if len(places) <= 20:
        colour = COLOURS[one.colour % len(COLOURS)]
        drawn += "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places)
    return drawn


def legend_of(one: Series, x: float, y: float) -> str:
    sample = f'<line x1="{x}" x2="{x + 24}" y1="{y}" y2="{y}" {stroke(one)}/>'
    return f'{sample}<text x="{x + 30}" y="{y + 4}">{escape(one.name)}</text>'


def sweeps(points: Sequence[Point]) -> list[str]:
    """Latency over what was varied, for each kind of load that has several rates or several numbers at once."""
    groups: dict[tuple[str, str, str], list[Point]] = {}
    for point in points:
        if point.part:
            continue
        varied = "rate" if point.rate else "concurrency"
        groups.setdefault((point.scenario, point.load.rsplit(", ", 1)[0], varied), []).append(point)
    found: list[str] = []
    for (scenario, shapes, varied), members in groups.items():
        if len({getattr(point, varied) for point in members}) < 2:
            continue
        x_label = "arrivals a second" if varied == "rate" else "requests at once"
        for title, key in (("end to end", "e2e"), ("first token", "ttft"), ("between chunks", "inter_token")):
            lines = sweep_lines(members, varied, [(f"p{percent}", f"{key}_p{percent}_ms") for percent in (50, 95, 99)])
            if any(y is not None for one in lines for _, y in one.points):
                found.append(chart(f"{scenario}: {shapes}, {title}", x_label, "ms", lines))
        rates = [("requests/s", "requests_s"), ("goodput", "goodput_s")]
        found.append(chart(f"{scenario}: {shapes}, answers", x_label, "requests/s", sweep_lines(members, varied, rates)))
    return found


def sweep_lines(members: Sequence[Point], varied: str, keys: Sequence[tuple[str, str]]) -> list[Series]:
    lines: list[Series] = []
    for colour, server in enumerate(dict.fromkeys(point.server for point in members)):
        own = sorted((point for point in members if point.server == server), key=lambda point: float(getattr(point, varied)))
        for dash, (name, key) in enumerate(keys):
            places = [(float(getattr(point, varied)), point.median(key)) for point in own]
            lines.append(Series(f"{server} {name}", places, colour, dash))
    return lines


def timelines(point: Point) -> list[str]:
    """Running and finished over the time of the last round; and memory, where it was looked at."""
    times = point.timeline
    if not times:
        return []
    where = f"{point.scenario}: {point.server}, {point.load}"
    lines = [Series("in flight", list(zip(times["at_s"], times["in_flight"], strict=True)), 0)]
    for colour, name in enumerate(("finished", "refused", "failed"), 1):
        if any(times[f"{name}_s"]):
            lines.append(Series(f"{name}/s", list(zip(times["at_s"], times[f"{name}_s"], strict=True)), colour))
    found = [chart(where, "seconds", "requests", lines)]
    if any(times.get("memory_bytes", ())):
        values = [value / 1e6 for value in times["memory_bytes"]]
        memory = Series("resident", list(zip(times["memory_at_s"], values, strict=True)), 3)
        found.append(chart(f"{where}, memory", "seconds", "MB", [memory]))
    return found


def page(found: Found, heading: str) -> str:
    """The whole report."""
    parts = [f"<h1>archerfish bench serve</h1><p>{escape(heading)}</p>"]
    if found.targets:
        rows = [
            [scenario, server, *row_of(judged)[:3], verdict(judged.is_met)]
            for scenario, server, judged in found.targets
        ]  # fmt: skip
        parts.append("<h2>Targets</h2>" + html_table(["scenario", "server", "target", "measured", "wanted", ""], rows))
    plots = sweeps(found.points)
    if plots:
        parts.append(f"<h2>By load</h2><div class='plots'>{''.join(plots)}</div>")
    parts.append("<h2>Figures</h2>")
    for (scenario, load), points in by_load(found.points).items():
        columns, cells = table(points)
        parts.append(f"<h3>{escape(scenario)}: {escape(load)}</h3>" + html_table(columns, cells))
    drawn = "".join(plot for point in found.points for plot in timelines(point))
    parts.append(f"<h2>Over time (last rounds)</h2><div class='plots'>{drawn}</div>")
    if found.notes or found.errors:
        said = [*found.notes, *(f"{server}: {error}" for server, error in found.errors.items())]
        parts.append("<h2>Remarks</h2><ul>" + "".join(f"<li>{escape(one)}</li>" for one in said) + "</ul>")
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>bench serve</title>'
    head += f"<style>{STYLE}</style>"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def verdict(is_met: bool | None) -> str:
    return "not measured" if is_met is None else "met" if is_met else "missed"


def html_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(html_cell(cell) for cell in row)}</tr>" for row in rows)
    return f"<div class='wide'><table><tr>{head}</tr>{body}</table></div>"


def html_cell(cell: str) -> str:
    verdict = f' class="{cell}"' if cell in ("met", "missed") else ""
    return f"<td{verdict}>{escape(cell)}</td>"
