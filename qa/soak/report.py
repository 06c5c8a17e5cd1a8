"""The report of a soak in Markdown, from its two files."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- soak: begin -->", "<!-- soak: end -->"
#: Parts of the soak whose medians are compared, to show growth.
PARTS = ("first tenth", "middle tenth", "last tenth")

Line = dict[str, Any]
Read = Callable[[Line], float | None]


def write_report(folder: Path, *, in_docs: bool = False) -> bool:
    """Write the report into the folder, or into the documentation; return whether every guarantee was kept."""
    samples, rounds = _lines(folder / "samples.jsonl"), _lines(folder / "rounds.jsonl")
    findings = [f"{each['fault']}: {text}" for each in rounds for text in each["findings"]]
    text = "\n".join([*_summary(samples, rounds), "", *_faults(rounds), "", *_growth(samples)])
    if in_docs:
        page = ROOT / "docs" / "reliability.md"
        before, rest = page.read_text().split(BEGIN)
        page.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")
    else:
        broken = [f"- {each}" for each in findings] or ["Every guarantee was kept."]
        (folder / "report.md").write_text("\n".join(["# Soak", "", text, "", "## Findings", "", *broken, ""]))
    return not findings


def _lines(path: Path) -> list[Line]:
    # The last line may be half written.
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def _summary(samples: list[Line], rounds: list[Line]) -> Iterator[str]:
    # The first sample is about the seconds before it.
    seconds = samples[-1]["at"] - samples[0]["at"] + samples[0]["seconds"]
    began = time.strftime("%d %B %Y", time.gmtime(samples[0]["at"]))
    tasks, broken = sum(each.get("tasks", 0) for each in rounds), sum(bool(each["findings"]) for each in rounds)
    yield (
        f"{began}: {seconds / 60:.0f} minutes, {len(rounds)} rounds, {tasks:,} tasks judged, "
        f"{tasks / seconds:.0f} a second. Rounds in which a guarantee was broken: {broken}."
    )


def _faults(rounds: list[Line]) -> Iterator[str]:
    by_fault: dict[str, list[Line]] = defaultdict(list)
    for each in rounds:
        by_fault[each["fault"]].append(each)
    yield "| fault | times | all workers work again after: median | longest | guarantees |"
    yield "|---|---|---|---|---|"
    for fault, times in sorted(by_fault.items(), key=lambda pair: pair[0].lower()):
        repaired = [each["repaired"] for each in times if "repaired" in each] or [float("nan")]
        result = "BROKEN" if any(each["findings"] for each in times) else "kept"
        yield f"| {fault} | {len(times)} | {median(repaired):.1f} s | {max(repaired):.1f} s | {result} |"


def _growth(samples: list[Line]) -> Iterator[str]:
    tenth = max(1, len(samples) // 10)
    middle = (len(samples) - tenth) // 2
    parts = [samples[:tenth], samples[middle : middle + tenth], samples[-tenth:]]
    yield f"| median in the | {' | '.join(PARTS)} |"
    yield "|---|---|---|---|"
    for title, unit, lines in _readings(samples):
        for name, read in lines:
            values = [[value for each in part if (value := read(each)) is not None] for part in parts]
            cells = [f"{median(each):,.{0 if median(each) >= 10 else 2}f}" if each else "" for each in values]
            yield f"| {title}: {name} ({unit}) | {' | '.join(cells)} |"


def _readings(samples: list[Line]) -> Iterator[tuple[str, str, list[tuple[str, Read]]]]:
    """Yield each kind of number: its title, its unit, and how to read its lines from a sample."""
    yield "finished", "tasks/s", [("all", lambda each: _of(each, "finished", over=each["seconds"]))]
    shares = [(name, _latency(at)) for at, name in enumerate(("p50", "p95", "p99"))]
    yield "from enqueue to start", "s", shares
    roles = sorted({role for each in samples for role in each["processes"]})
    yield "memory of the largest process", "MiB", [(role, _process(role, 0, 1024)) for role in roles]
    yield "threads of the largest process", "threads", [(role, _process(role, 1, 1)) for role in roles]
    kinds = sorted({kind for each in samples for kind in each.get("sessions", ())} - {"soak"})
    yield "database sessions", "sessions", [(kind, _session(kind)) for kind in kinds]
    tables = ("task", "worker", "schedule", "waiter")
    yield "dead rows", "rows", [(table, _table(table, 1, 1)) for table in tables]
    sizes = [
        (f"{table}, {part}", _table(table, at, 2**20)) for table in ("task", "attempt") for part, at in _PARTS_OF_TABLE
    ]
    yield "size", "MiB", sizes


_PARTS_OF_TABLE = (("table", 2), ("indexes", 3))


def _of(sample: Line, name: str, over: float) -> float | None:
    value = sample.get(name)
    return None if value is None else value / over


def _latency(at: int) -> Read:
    return lambda sample: (sample.get("latency") or [None] * 3)[at]


def _process(role: str, at: int, unit: int) -> Read:
    return lambda sample: max((each[at] / unit for each in sample["processes"].get(role, ())), default=None)


def _session(kind: str) -> Read:
    return lambda sample: sample["sessions"].get(kind, 0) if "sessions" in sample else None


def _table(table: str, at: int, unit: int) -> Read:
    return lambda sample: sample["tables"][table][at] / unit if "tables" in sample else None
