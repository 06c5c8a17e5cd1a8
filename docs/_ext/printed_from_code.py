"""Directives that print parts of the code, so that the reference says nothing a second time.

``{settings-list}``, ``{options-list}``, ``{models-list}``, ``{command} NAME``, ``{metrics-list}``, ``{checks-list}``
and ``{states-picture}``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import code_facts
from docutils import nodes
from docutils.parsers.rst import Directive

#: Where each status stands in the picture: column, row.
PLACES = {
    "SCHEDULED": (0, 0),
    "BLOCKED": (0, 2),
    "READY": (1, 1),
    "RUNNING": (2, 1),
    "SUCCESSFUL": (3, 0),
    "FAILED": (3, 1),
    "CANCELLED": (3, 2),
}
WIDTH, HEIGHT, GAP_X, GAP_Y = 120, 40, 70, 60


def sentences(text: str) -> nodes.paragraph:
    """Return a paragraph of a text in which double backticks mark code."""
    parts = re.split(r"``(.+?)``", " ".join(text.split()))
    return nodes.paragraph("", "", *(nodes.literal(text=p) if n % 2 else nodes.Text(p) for n, p in enumerate(parts)))


def definitions(rows: Iterable[tuple[str, str]]) -> nodes.definition_list:
    """Return a list of terms, which are code, and what is said of each."""
    listing = nodes.definition_list()
    for term, text in rows:
        said = nodes.definition("", sentences(text))
        listing += nodes.definition_list_item("", nodes.term("", "", nodes.literal(text=term)), said)
    return listing


def listing(facts: Callable[[], Iterator[tuple[str, str]]]) -> type[Directive]:
    """Return the directive that prints these facts."""
    return type("Listing", (Directive,), {"run": lambda directive: [definitions(facts())]})


class ModelsList(Directive):
    """Each model with its columns."""

    def run(self) -> list[nodes.Node]:
        """Return a heading, a sentence and a list for each model."""
        from django.apps import apps

        shown: list[nodes.Node] = []
        for model in sorted(apps.get_app_config("django_pglock").get_models(), key=lambda each: each.__name__):
            shown += [nodes.rubric(text=f"{model.__name__}: {model._meta.db_table}"), sentences(model.__doc__ or "")]
            shown.append(definitions(code_facts.columns(model)))
        return shown


class CommandHelp(Directive):
    """The help of a command."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return what it does, and the list of its arguments and subcommands."""
        text, facts = code_facts.arguments(self.arguments[0])
        return [sentences(text), definitions(facts)]


class StatesPicture(Directive):
    """The states of a task and the moves between them."""

    def run(self) -> list[nodes.Node]:
        """Return the drawing."""
        return [nodes.raw("", draw(), format="html")]


def draw() -> str:
    """Draw the table of moves as SVG. Raises ``KeyError`` for a status that has no place yet."""
    from django_pglock.tasks.states import MOVES

    arrows = [_arrow(source.value, target.value) for source, targets in MOVES.items() for target in sorted(targets)]
    boxes = [_box(status.value, str(status.label)) for status in MOVES]
    width = 4 * WIDTH + 3 * GAP_X + 20
    height = 3 * HEIGHT + 2 * GAP_Y + 60
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="The states of a task" '
        'font-family="sans-serif" font-size="14">'
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#7a869a"/></marker></defs>'
        f"{''.join(arrows)}{''.join(boxes)}</svg>"
    )


def _corner(status: str) -> tuple[int, int]:
    column, row = PLACES[status]
    return 10 + column * (WIDTH + GAP_X), 30 + row * (HEIGHT + GAP_Y)


def _box(status: str, label: str) -> str:
    x, y = _corner(status)
    return (
        f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#2b6cb0"/>'
        f'<text x="{x + WIDTH / 2}" y="{y + HEIGHT / 2 + 5}" text-anchor="middle" fill="#fff">{label}</text>'
    )


def _arrow(source: str, target: str) -> str:
    (x1, y1), (x2, y2) = _corner(source), _corner(target)
    if x1 == x2:
        # One below the other: straight from box to box.
        middle_x, down = x1 + WIDTH / 2, y2 > y1
        start, end = (middle_x, y1 + HEIGHT * down), (middle_x, y2 + HEIGHT * (not down))
        return _line(start, start, end)
    forward = x2 > x1
    far = abs(x2 - x1) > WIDTH + GAP_X
    # Backwards and long ways bend around the boxes between; the row decides to which side.
    start = (x1 + WIDTH, y1 + HEIGHT / 2 - 6) if forward else (x1, y1 + HEIGHT / 2 + 6)
    end = (x2, y2 + HEIGHT / 2 - 6) if forward else (x2 + WIDTH, y2 + HEIGHT / 2 + 6)
    bend = 0 if not far else (70 if y2 >= y1 and y1 != _corner("CANCELLED")[1] else -70)
    middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2 + bend)
    return _line(start, middle, end)


def _line(start: tuple[float, float], middle: tuple[float, float], end: tuple[float, float]) -> str:
    return (
        f'<path d="M{start[0]} {start[1]} Q{middle[0]} {middle[1]} {end[0]} {end[1]}" fill="none" '
        'stroke="#7a869a" stroke-width="1.5" marker-end="url(#tip)"/>'
    )


def setup(app: Any) -> dict[str, Any]:
    """Register the directives."""
    for name in ("settings", "options", "metrics", "checks"):
        app.add_directive(f"{name}-list", listing(getattr(code_facts, name)))
    app.add_directive("models-list", ModelsList)
    app.add_directive("command", CommandHelp)
    app.add_directive("states-picture", StatesPicture)
    return {"parallel_read_safe": True}
