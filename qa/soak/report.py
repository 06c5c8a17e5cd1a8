"""The report of a soak in Markdown: a row for each fault."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from statistics import median
from typing import Any

#: A round: its fault, how many tasks were judged, the seconds until all workers worked again, and the findings.
Round = dict[str, Any]


def report(rounds: list[Round]) -> Iterator[str]:
    """Yield the lines of the report."""
    seconds = max(rounds[-1]["at"] + rounds[-1]["seconds"] - rounds[0]["at"], 1)
    tasks, broken = sum(each.get("tasks", 0) for each in rounds), sum(bool(each["findings"]) for each in rounds)
    yield (
        f"{seconds / 60:.0f} minutes, {len(rounds)} rounds, {tasks:,} tasks judged, {tasks / seconds:.0f} a second. "
        f"Rounds in which a guarantee was broken: {broken}."
    )
    by_fault: dict[str, list[Round]] = defaultdict(list)
    for each in rounds:
        by_fault[each["fault"]].append(each)
    yield "\n| fault | times | all workers work again after: median | longest | guarantees |"
    yield "|---|---|---|---|---|"
    for fault, times in sorted(by_fault.items(), key=lambda pair: pair[0].lower()):
        repaired = [each["repaired"] for each in times if "repaired" in each] or [float("nan")]
        result = "BROKEN" if any(each["findings"] for each in times) else "kept"
        yield f"| {fault} | {len(times)} | {median(repaired):.1f} s | {max(repaired):.1f} s | {result} |"
