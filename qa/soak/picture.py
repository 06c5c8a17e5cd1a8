"""One SVG with a panel for each kind of number, over the same time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

WIDTH, HEIGHT, LEFT, LEGEND, HEAD, FOOT = 920, 90, 60, 200, 24, 20
#: Points of a line, at most: more are not seen.
POINTS = 360
COLOURS = ("#44b78b", "#2f6fb7", "#d1582f", "#8a4fb5", "#b79a2f", "#7a869a")
STYLE = """
svg { font-family: sans-serif; }
text { fill: #1c2733; font-size: 11px; }
.title { font-weight: bold; }
.frame { fill: none; stroke: #b9c2d0; }
path { fill: none; stroke-width: 1.2; }
@media (prefers-color-scheme: dark) { text { fill: #dfe6ee; } .frame { stroke: #4a5666; } }
"""

Values = Sequence[float | None]


@dataclass(frozen=True)
class Panel:
    """Some lines with one scale. ``pick`` makes one value of several that share a point."""

    title: str
    is_logarithmic: bool
    pick: Callable[[Sequence[float]], float]
    lines: Sequence[tuple[str, Values]]


def draw(panels: Sequence[Panel], moments: Sequence[float]) -> str:
    """Return the SVG of panels whose values were taken at these moments, in seconds."""
    height = len(panels) * (HEAD + HEIGHT) + FOOT + 10
    minutes = (moments[-1] - moments[0]) / 60
    parts = [part for at, panel in enumerate(panels) for part in _panel(panel, at * (HEAD + HEIGHT) + HEAD)]
    for share in (0, 0.25, 0.5, 0.75, 1):
        x = LEFT + share * (WIDTH - LEFT - LEGEND)
        parts.append(f'<text x="{x:.0f}" y="{height - 8}" text-anchor="middle">{share * minutes:.0f} min</text>')
    label = "Rate, latency, memory, threads, sessions, dead rows and size over time"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{label}">'
        f"<style>{STYLE}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _panel(panel: Panel, y: int) -> Iterator[str]:
    lines = [(name, _fewer(values, panel.pick)) for name, values in panel.lines]
    known = [value for _, values in lines for value in values if value is not None]
    top, low = max(known, default=1.0) or 1.0, min((value for value in known if value > 0), default=1.0)
    width = WIDTH - LEFT - LEGEND
    yield f'<text class="title" x="{LEFT}" y="{y - 6}">{escape(panel.title)}</text>'
    yield f'<rect class="frame" x="{LEFT}" y="{y}" width="{width}" height="{HEIGHT - 10}"/>'
    yield f'<text x="{LEFT - 6}" y="{y + 10}" text-anchor="end">{_short(top)}</text>'
    bottom = low if panel.is_logarithmic else 0.0
    yield f'<text x="{LEFT - 6}" y="{y + HEIGHT - 10}" text-anchor="end">{_short(bottom)}</text>'

    def share(value: float) -> float:
        if not panel.is_logarithmic:
            return value / top
        return math.log(max(value, low) / low) / (math.log(top / low) or 1.0)

    for at, (name, values) in enumerate(lines):
        colour = COLOURS[at % len(COLOURS)]
        yield f'<path stroke="{colour}" d="{_path(values, share, y, width)}"/>'
        legend_y = y + 10 + at * 13
        yield f'<path stroke="{colour}" d="M{WIDTH - LEGEND + 10} {legend_y - 4}h14"/>'
        yield f'<text x="{WIDTH - LEGEND + 28}" y="{legend_y}">{escape(name)}</text>'


def _path(values: Values, share: Callable[[float], float], y: int, width: int) -> str:
    """Return the path of a line. It is broken where a value is missing."""
    step = width / max(len(values) - 1, 1)
    parts = []
    for is_known, group in groupby(enumerate(values), key=lambda each: each[1] is not None):
        if is_known:
            points = [
                f"{LEFT + at * step:.1f} {y + (HEIGHT - 10) * (1 - share(value or 0.0)):.1f}" for at, value in group
            ]
            parts.append(f"M{'L'.join(points)}" + ("h1" if len(points) == 1 else ""))
    return "".join(parts)


def _fewer(values: Values, pick: Callable[[Sequence[float]], float]) -> Values:
    size = math.ceil(len(values) / POINTS) or 1
    groups = [[value for value in values[at : at + size] if value is not None] for at in range(0, len(values), size)]
    return [pick(group) if group else None for group in groups]


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.2g}"
