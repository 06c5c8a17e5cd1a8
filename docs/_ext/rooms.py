"""Draws the floors and rooms of the package as SVG, from the contract in pyproject.toml and the files that are there.

``python docs/_ext/rooms.py`` writes ``docs/_static/rooms.svg``; a test fails if that picture is not current.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "django_pglock"
PICTURE = ROOT / "docs" / "_static" / "rooms.svg"
WIDTH, PAD, GAP, LINE = 1120, 10, 8, 15
#: Pixels of a letter of the small text, on average.
LETTER = 6.3
#: And of the titles.
TITLE_LETTER = 8.6
STYLE = """
svg { font-family: sans-serif; }
rect { fill: #f6f8fb; stroke: #b9c2d0; }
.room { fill: #ffffff; stroke: #44b78b; }
.inner { fill: #eef8f4; stroke: #9fd6c1; }
text { fill: #1c2733; font-size: 11px; }
.title { font-size: 13px; font-weight: bold; }
@media (prefers-color-scheme: dark) {
  rect { fill: #1b222c; stroke: #4a5666; }
  .room { fill: #151a21; stroke: #44b78b; }
  .inner { fill: #16241f; stroke: #2f7a5d; }
  text { fill: #dfe6ee; }
}
"""


@dataclass
class Room:
    """A module or a package of the house: its files, and the rooms inside of it."""

    name: str
    files: list[str]
    rooms: list[Room] = field(default_factory=list)

    @property
    def weight(self) -> float:
        """Its share of the width that is left when each room is wide enough for its name."""
        return float(sum(len(each) + 2 for each in self.files) ** 0.6) + sum(room.weight for room in self.rooms)

    @property
    def least(self) -> float:
        """Pixels for its name."""
        return len(self.name) * TITLE_LETTER + 2 * PAD


@dataclass
class Box:
    """A room at its place."""

    room: Room
    x: float
    y: float
    width: float
    lines: list[str]
    inner: list[Box]

    @property
    def height(self) -> float:
        """Its height in pixels."""
        rows = max([box.height for box in self.inner], default=0)
        return PAD * 2 + LINE * (1 + len(self.lines)) + (rows + GAP if self.inner else 0)


def floors() -> list[list[str]]:
    """Return the names on each floor, the highest first, as import-linter checks them."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    [contract] = [each for each in settings["contracts"] if each.get("containers") == ["django_pglock"]]
    return [[name.strip("() ") for name in layer.replace(":", "|").split("|")] for layer in contract["layers"]]


def room_of(path: Path) -> Room:
    """Return what is in a package, or a module alone."""
    if path.with_suffix(".py").exists():
        return Room(path.name, [])
    files = sorted(each.stem for each in path.glob("*.py") if each.stem != "__init__")
    inner = [each for each in sorted(path.iterdir()) if (each / "__init__.py").exists()]
    return Room(path.name, files, [room_of(each) for each in inner])


def placed(rooms: list[Room], x: float, y: float, width: float) -> list[Box]:
    """Place rooms beside each other."""
    left = width - GAP * (len(rooms) - 1) - sum(room.least for room in rooms)
    weights = sum(room.weight for room in rooms)
    boxes = []
    for room in rooms:
        own = room.least + (left * room.weight / weights if weights else left / len(rooms))
        lines = list(wrapped(room.files, int((own - 2 * PAD) / LETTER)))
        top = y + PAD + LINE * (1 + len(lines)) + GAP
        boxes.append(Box(room, x, y, own, lines, placed(room.rooms, x + PAD, top, own - 2 * PAD) if room.rooms else []))
        x += own + GAP
    return boxes


def wrapped(words: list[str], letters: int) -> Iterator[str]:
    """Yield lines of at most so many letters, if words are no longer."""
    line = ""
    for word in words:
        if line and len(line) + 1 + len(word) > letters:
            yield line
            line = word
        else:
            line = f"{line} {word}".strip()
    if line:
        yield line


def drawn(box: Box, height: float, kind: str) -> Iterator[str]:
    """Yield the SVG of a box."""
    yield f'<rect class="{kind}" x="{box.x:.0f}" y="{box.y:.0f}" width="{box.width:.0f}" height="{height:.0f}" rx="5"/>'
    x, y = box.x + PAD, box.y + PAD + 11
    yield f'<text class="title" x="{x:.0f}" y="{y:.0f}">{escape(box.room.name)}</text>'
    for line in box.lines:
        y += LINE
        yield f'<text x="{x:.0f}" y="{y:.0f}">{escape(line)}</text>'
    tallest = max([each.height for each in box.inner], default=0)
    for each in box.inner:
        yield from drawn(each, tallest, "inner")


def picture() -> str:
    """Return the whole picture."""
    parts: list[str] = []
    y = float(GAP)
    for names in floors():
        boxes = placed([room_of(PACKAGE / name) for name in names], 2 * GAP, y + GAP, WIDTH - 4 * GAP)
        height = max(box.height for box in boxes)
        parts.append(f'<rect x="{GAP}" y="{y:.0f}" width="{WIDTH - 2 * GAP}" height="{height + 2 * GAP:.0f}" rx="7"/>')
        for box in boxes:
            parts.extend(drawn(box, height, "room"))
        y += height + 3 * GAP
    label = "The floors of django_pglock: a module imports only from floors below its own"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y:.0f}" role="img" aria-label="{label}">'
        f"<style>{STYLE}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


if __name__ == "__main__":
    PICTURE.write_text(picture())
