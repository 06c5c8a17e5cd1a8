"""The tables and the picture of what a fleet costs: ``bench/fleet.py draw`` makes them of the figures of its runs."""

from __future__ import annotations

import json
from html import escape
from math import log
from pathlib import Path
from typing import Any

STATIC = Path(__file__).resolve().parent.parent / "docs" / "_static"
#: Figures in the picture.
DRAWN = ("idle, server ms a second", "trickle, statements a task", "trickle, server ms a task")
STYLE = """
svg { font-family: sans-serif; } text { font-size: 12px; fill: #1c2733; }
path { fill: none; stroke-width: 2; }
.before { stroke: #b9770e; } .after { stroke: #1a8f63; } .axis { stroke: #8a96a6; }
@media (prefers-color-scheme: dark) { text { fill: #dfe6ee; } }
"""


def draw(file: Path) -> None:
    """Print the figures of the file as tables, and draw some of them."""
    known = json.loads(file.read_text())
    runs = {name: known[name] for name in ("before", "after") if name in known}
    counts = sorted({int(count) for run in runs.values() for count in run})
    for figure in dict.fromkeys(figure for run in runs.values() for found in run.values() for figure in found):
        for name, run in runs.items():
            cells = [f"{run[str(n)].get(figure, 0):.4g}" if str(n) in run else "" for n in counts]
            print(f"| {figure}, {name} | {' | '.join(cells)} |")
    panels = [panel(figure, runs, counts, 360 * place) for place, figure in enumerate(DRAWN)]
    text = f'<text x="10" y="270">{escape(known["when"])}</text>'
    picture = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1080 280"><style>{STYLE}</style>'
    (STATIC / "fleet.svg").write_text(f"{picture}{''.join(panels)}{text}</svg>\n")


def panel(figure: str, runs: dict[str, Any], counts: list[int], left: float) -> str:
    """Return the lines of one figure over the number of workers, whose axis is logarithmic."""
    most = max(found[figure] for run in runs.values() for found in run.values())
    parts = [f'<text x="{left + 20}" y="20">{escape(figure)}, by workers</text>']
    place = {n: left + 30 + 240 * log(n) / max(log(counts[-1]), 1) for n in counts}
    parts += [f'<text x="{x - 6:.0f}" y="246">{n}</text>' for n, x in place.items()]
    parts.append(f'<path class="axis" d="M{left + 25} 230H{left + 280}"/>')
    for name, run in runs.items():
        points = [
            (place[n], 230 - 180 * run[str(n)][figure] / most, run[str(n)][figure]) for n in counts if str(n) in run
        ]
        line = "L".join(f"{x:.0f} {y:.0f}" for x, y, _ in points)
        x, y, last = points[-1]
        parts.append(
            f'<path class="{name}" d="M{line}"/><text x="{x + 5:.0f}" y="{y + 4:.0f}">{name} {last:.3g}</text>'
        )
    return "".join(parts)
