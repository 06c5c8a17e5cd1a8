"""The table of the results: one row for each guarantee of each fault."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

BEGIN, END = "<!-- chaos: begin -->", "<!-- chaos: end -->"
HEAD = ("fault", "guarantee", "bound", "measured", "result")


@dataclass(frozen=True)
class Row:
    """One guarantee under one fault. Seconds; None if nothing is measured, or if nothing could be shown."""

    fault: str
    guarantee: str
    bound: float | None
    measured: float | None
    is_kept: bool | None

    def cells(self) -> tuple[str, ...]:
        """Return what the table shows."""
        result = {True: "kept", False: "BROKEN", None: "not shown"}[self.is_kept]
        return (self.fault, self.guarantee, _seconds(self.bound), _seconds(self.measured), result)


def table(rows: list[Row]) -> str:
    """Return the rows as a table in markdown."""
    # Sorted by fault, because tests may run in any order.
    in_order = sorted(rows, key=lambda row: row.fault.lower())
    lines = [HEAD, ("---",) * len(HEAD), *(row.cells() for row in in_order)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def write(rows: list[Row], path: Path) -> None:
    """Write the table into a file, between the two marks if it has them."""
    old = path.read_text() if path.exists() else ""
    if BEGIN in old and END in old:
        before, after = old.split(BEGIN)[0], old.split(END)[1]
        path.write_text(f"{before}{BEGIN}\n{table(rows)}{END}{after}")
    else:
        path.write_text(table(rows))


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} s"
