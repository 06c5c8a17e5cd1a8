"""Tables in Markdown, with the aims and whether they are met."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from bench.rounds import OURS, RAW, Bench, Case


def verdict(is_met: bool, aim: str) -> str:
    """Return an aim and what became of it."""
    return f"{aim} {'met' if is_met else 'MISSED'}"


def rates_table(rates: dict[str, float], aims: dict[str, float], *, ours: str = OURS) -> list[Sequence[str]]:
    """Compare rates with the raw loop's and with ours; an aim says how many times as fast ours has to be."""
    rows: list[Sequence[str]] = [("contestant", "tasks a second", "of raw", "ours is … times as fast", "aim")]
    for name, rate in rates.items():
        of_raw = f"{rate / rates[RAW]:.2f}" if RAW in rates else ""
        ratio = rates[ours] / rate if ours in rates else None
        aim = verdict(ratio >= aims[name], f"at least {aims[name]:g}") if ratio and name in aims else ""
        rows.append((name, f"{rate:,.0f}", of_raw, f"{ratio:.2f}" if ratio else "", aim))
    return rows


def cost_table(
    bench: Bench, name: str, measure: Case, without: Callable[[int], float], limit: float
) -> list[Sequence[str]]:
    """Say how much slower a case is than the same without what is in its way."""
    rates = bench.medians({name: measure, "without": partial(without, bench.tasks)})
    rows: list[Sequence[str]] = [("case", "tasks a second", "cost", "aim")]
    for each, rate in rates.items():
        cost = 1 - rate / rates.get("without", rate)
        aim = verdict(cost < limit, f"below {limit:.0%}") if each == name and len(rates) > 1 else ""
        rows.append((each, f"{rate:,.0f}", f"{cost:.1%}" if each == name else "", aim))
    return rows


def print_table(rows: list[Sequence[str]], failed: dict[str, str]) -> None:
    """Print rows, the first of which is the heading, and then those who failed."""
    heading, *lines = rows
    lines += [(name, *[""] * (len(heading) - 2), f"failed: {reason}") for name, reason in failed.items()]
    print(f"| {' | '.join(heading)} |\n|---|{'---:|' * (len(heading) - 2)}---|")
    for line in lines:
        print(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |")
