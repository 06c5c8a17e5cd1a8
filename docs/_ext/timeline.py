"""The directive ``{timeline}``: who does what when, as a picture.

Each line is a lane, its steps parted by bars; time runs to the right::

    one | [ lock | read 5 | write 6 ] | COMMIT
    two |        |        | [ lock | ! read 5

``[`` and ``]`` say from where to where something is held, ``!`` marks what goes wrong, ``+`` what goes right.
"""

from __future__ import annotations

from html import escape
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive

LABEL, STEP, LANE, TOP = 92, 122, 46, 8
COLOURS = {"!": "#c53030", "+": "#2f855a", "": "#2b6cb0"}
TEXTS = {"role": "img", "font-family": "sans-serif", "font-size": "13"}


class Timeline(Directive):
    """Lanes of steps."""

    has_content = True
    optional_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Return the drawing; its argument is what is said to who cannot see it."""
        lanes = [[cell.strip() for cell in line.split("|")] for line in self.content if line.strip()]
        title = self.arguments[0] if self.arguments else "A picture in time"
        return [nodes.raw("", draw(lanes, title), format="html")]


def draw(lanes: list[list[str]], title: str) -> str:
    """Draw lanes as SVG. The first cell of each is its name."""
    steps = max(len(lane) for lane in lanes) - 1
    width, height = LABEL + steps * STEP + 8, TOP + len(lanes) * LANE + 22
    attributes = " ".join(f'{name}="{value}"' for name, value in TEXTS.items())
    body = "".join(_lane(lane, TOP + row * LANE) for row, lane in enumerate(lanes))
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" style="max-width: 100%; height: auto" {attributes}>'
        f"<title>{escape(title)}</title>"
        f"<desc>{escape('; '.join(' '.join(lane) for lane in lanes))}</desc>{body}"
        f'<path d="M{LABEL} {height - 10} H{width - 8}" stroke="#7a869a"/>'
        f'<path d="M{width - 14} {height - 14} L{width - 6} {height - 10} L{width - 14} {height - 6} z" '
        'fill="#7a869a"/>'
        f'<text x="{LABEL - 10}" y="{height - 6}" text-anchor="end" fill="#7a869a">time</text></svg>'
    )


def _lane(cells: list[str], y: int) -> str:
    name, *steps = cells
    middle = y + LANE / 2
    drawn = [f'<text x="{LABEL - 10}" y="{middle + 5}" text-anchor="end" fill="currentColor">{escape(name)}</text>']
    held_from = None
    boxes = []
    for column, cell in enumerate(steps):
        x = LABEL + column * STEP
        if cell.startswith("["):
            held_from = x
        if step := cell.strip("[] "):
            boxes.append(_box(step, x, y))
        if held_from is not None and (cell.endswith("]") or column == len(steps) - 1):
            drawn.append(_held(held_from, x + STEP, y))
            held_from = None
    return "".join(drawn + boxes)


def _held(start: int, end: int, y: int) -> str:
    return (
        f'<rect x="{start}" y="{y + 1}" width="{end - start - 6}" height="{LANE - 6}" rx="8" '
        'fill="#d69e2e" fill-opacity="0.35"/>'
    )


def _box(step: str, x: int, y: int) -> str:
    mark = step[0] if step[0] in "!+" else ""
    text = step.removeprefix(mark).strip()
    return (
        f'<rect x="{x + 3}" y="{y + 7}" width="{STEP - 12}" height="{LANE - 18}" rx="5" fill="{COLOURS[mark]}"/>'
        f'<text x="{x + 3 + (STEP - 12) / 2}" y="{y + 26}" text-anchor="middle" fill="#fff">{escape(text)}</text>'
    )


def setup(app: Any) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("timeline", Timeline)
    return {"parallel_read_safe": True}
