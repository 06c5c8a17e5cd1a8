"""What became of the tasks, decided from rows alone: no log is read, and no process is asked.

Times are seconds since the epoch. Tests, workers and server share one machine, so they share its clock, too.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from uuid import UUID

FINISHED = {"SUCCESSFUL", "FAILED", "CANCELLED"}

LOST = "lost"
STUCK = "stuck"
FAILED = "failed without a fault of its own"
TWICE_AT_ONCE = "run twice at once"
KEY_AT_ONCE = "two of one key at once"
EFFECT_TWICE = "effect not exactly once"
ZOMBIE = "outcome of a zombie"


@dataclass(frozen=True)
class TaskRow:
    """How a task ended. ``result`` is the attempt that the function returned, if it was successful."""

    id: int
    status: str
    attempts: int
    result: object = None


@dataclass(frozen=True)
class RunRow:
    """One run of a function; ``ended`` is None if it never wrote that it ended."""

    task: int
    attempt: int
    worker: UUID
    started: float
    ended: float | None
    key: str = ""
    is_atomic: bool = False
    thread: str = ""


@dataclass(frozen=True)
class Absence:
    """A time in which a worker could do nothing. A death lasts forever, and a stop until the worker continues."""

    worker: UUID
    began: float
    ended: float = math.inf
    #: The worker continued to compute, but could not report it.
    is_cut_off: bool = False


@dataclass(frozen=True)
class Finding:
    """One guarantee that does not hold, for one task."""

    verdict: str
    task: int
    text: str


@dataclass(frozen=True)
class Evidence:
    """All rows of one fault, and which tasks were enqueued."""

    enqueued: Collection[int]
    tasks: Collection[TaskRow]
    runs: Collection[RunRow]
    absences: Collection[Absence] = ()

    def findings(self, *, may_fail: Collection[int] = (), may_wait: Collection[int] = ()) -> list[Finding]:
        """Return every violation of a guarantee. Some tasks may be meant to fail, or to wait."""
        return [
            *self._lost(),
            *self._not_done(may_fail, may_wait),
            *self._wrong_outcomes(),
            *self._wrong_effects(),
            *self._at_once(),
        ]

    def _lost(self) -> Iterator[Finding]:
        there = {task.id for task in self.tasks}
        ended = {run.task for run in self.runs if run.ended is not None}
        for task in set(self.enqueued) - there:
            yield Finding(LOST, task, "was enqueued, and its row is gone")
        for task in self.tasks:
            if task.status == "SUCCESSFUL" and task.id not in ended:
                yield Finding(LOST, task.id, "is SUCCESSFUL and was never run to its end")

    def _not_done(self, may_fail: Collection[int], may_wait: Collection[int]) -> Iterator[Finding]:
        for task in self.tasks:
            if task.status not in FINISHED and task.id not in may_wait:
                yield Finding(STUCK, task.id, f"is {task.status} at the end")
            if task.status in FINISHED - {"SUCCESSFUL"} and task.id not in may_fail:
                yield Finding(FAILED, task.id, f"is {task.status}")

    def _wrong_outcomes(self) -> Iterator[Finding]:
        for task in self.tasks:
            if task.status == "SUCCESSFUL" and task.result != task.attempts:
                yield Finding(ZOMBIE, task.id, f"has the outcome of attempt {task.result}, not of {task.attempts}")

    def _wrong_effects(self) -> Iterator[Finding]:
        for task in self.tasks:
            effects = [run.attempt for run in self.runs if run.task == task.id and run.is_atomic]
            if len(effects) > 1 or (effects and task.status != "SUCCESSFUL"):
                yield Finding(EFFECT_TWICE, task.id, f"is {task.status} and has effects of attempts {effects}")

    def _at_once(self) -> Iterator[Finding]:
        for verdict, groups in ((TWICE_AT_ONCE, self._by_task()), (KEY_AT_ONCE, self._by_key())):
            for one, other in (pair for runs in groups for pair in _overlapping(runs)):
                same_task = one.task == other.task
                if same_task == (verdict == TWICE_AT_ONCE) and (seconds := self._together(one, other)) > 0:
                    text = f"attempts {one.attempt} and {other.attempt} of {other.task}, {seconds:.3f} s together"
                    yield Finding(verdict, one.task, text)

    def _by_task(self) -> Iterable[list[RunRow]]:
        return _grouped((run.task, run) for run in self.runs)

    def _by_key(self) -> Iterable[list[RunRow]]:
        return _grouped((run.key, run) for run in self.runs if run.key)

    def _together(self, one: RunRow, other: RunRow) -> float:
        """Return the number of seconds in which two runs overlapped."""
        pairs = ((a, b) for a in self._present(one) for b in self._present(other))
        return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in pairs)

    def _present(self, run: RunRow) -> list[tuple[float, float]]:
        """Return when a run was in progress: from its start to its end, without the absences of its worker.

        If a run was in progress when its worker was cut off for long, it had computed everything by then. After the
        absence only the message about its end arrives, which waits for a new connection. The message about its start
        may have been sent just before the absence, and may arrive later.
        """
        spans = [(run.started, math.inf if run.ended is None else run.ended)]
        for absence in self.absences:
            if absence.worker == run.worker:
                until = math.inf if absence.is_cut_off and run.started < absence.ended else absence.ended
                spans = [part for span in spans for part in _without(span, (absence.began, until))]
        return spans

    def recovery(self, in_flight: Collection[int], victim: UUID | None, since: float) -> Recovery:
        """Return after how long the victim's tasks began elsewhere, and other workers finished anything.

        ``since`` is the moment of the fault, or of its end. Without a victim, any worker counts as elsewhere. A task
        that was finished at that moment need not run again. It only seemed to run, because its answer was in transit.

        Raises ``AssertionError`` if no task had to run again, because then nothing was shown.
        """
        elsewhere = [run for run in self.runs if run.worker != victim]
        began = {(run.task, run.attempt): run.started for run in self.runs}
        done = {each.id for each in self.tasks if began.get((each.id, each.result), math.inf) < since}
        begun = {
            task: min((run.started for run in elsewhere if run.task == task and run.started >= since), default=math.inf)
            for task in set(in_flight) - done
        }
        assert begun, "nothing is shown: the victim had no task that had to run again"
        finished = [run.ended for run in elsewhere if run.ended is not None and run.ended >= since]
        return Recovery(
            first=min(begun.values()) - since,
            last=max(begun.values()) - since,
            others=min(finished, default=math.inf) - since,
        )

    def begins(self, worker: UUID, since: float) -> float:
        """Return after how many seconds a worker began anything, counted from a moment."""
        return min(self.begins_of_threads(worker, since).values(), default=math.inf)

    def begins_of_threads(self, worker: UUID, since: float) -> dict[str, float]:
        """Return after how many seconds each thread of a worker began anything, for the threads that did."""
        begins: dict[str, float] = {}
        for run in self.runs:
            if run.worker == worker and run.started >= since:
                begins[run.thread] = min(begins.get(run.thread, math.inf), run.started - since)
        return begins


@dataclass(frozen=True)
class Recovery:
    """Seconds until the first and the last of the victim's tasks ran elsewhere, and until others finished anything."""

    first: float
    last: float
    others: float


def _overlapping(runs: Iterable[RunRow]) -> Iterator[tuple[RunRow, RunRow]]:
    """Yield the pairs of runs that may have overlapped."""
    open_runs: list[RunRow] = []
    for run in sorted(runs, key=attrgetter("started")):
        open_runs = [other for other in open_runs if other.ended is None or other.ended > run.started]
        yield from ((other, run) for other in open_runs)
        open_runs.append(run)


def _grouped(pairs: Iterable[tuple[object, RunRow]]) -> Iterable[list[RunRow]]:
    groups: dict[object, list[RunRow]] = {}
    for name, run in pairs:
        groups.setdefault(name, []).append(run)
    return groups.values()


def _without(span: tuple[float, float], hole: tuple[float, float]) -> list[tuple[float, float]]:
    parts = [(span[0], min(span[1], hole[0])), (max(span[0], hole[1]), span[1])]
    return [(start, end) for start, end in parts if start < end]
