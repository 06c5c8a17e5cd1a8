"""Worker processes under load, and the faults that are applied to them."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from uuid import UUID

from django.db import connection, transaction

from django_pglock.models import Attempt, Queue, RateLimit, Task, Waiter, Worker
from example_project.postgres import PrivatePostgres
from qa.chaos.evidence import FINISHED, Absence, Evidence, RunRow, TaskRow
from qa.chaos.report import Row
from tests.conftest import WorkerProcess
from tests.sample import chaos_tasks
from tests.sample.models import Run
from tests.sql import execute_sql

NOTHING_WRONG = "nothing lost, stuck, twice at once or with two effects; no outcome of a zombie"
KEYS = 5
#: With fewer tasks ready than these, twelve threads have not enough to do.
PLENTY = 16


#: The environment of workers, without the variables of a fault.
ENVIRONMENT = {"DJANGO_SETTINGS_MODULE": "qa.chaos.settings"}


#: Lines of the log: a child is ready, with its name, its process and the start of its id; a child has ended.
IS_READY = re.compile(r"Worker (\S+:(\d+):(\w+)) is ready")
HAS_ENDED = re.compile(r"^(\S+ \S+) .*worker-\d+\[(\d+)\] has ended")


class ChaosWorker(WorkerProcess):
    """A worker: a parent with one child, as its log tells. With the moments at which both have ended."""

    ended_at: float | None = None
    #: Starts a replacement, as a service manager does. None: it was started.
    start_replacement: Callable[[], ChaosWorker] | None = None

    def __init__(self, *arguments: str, **options: Any) -> None:
        #: The children that were ready: name, process and start of the id.
        self.children: list[tuple[str, int, str]] = []
        #: When children ended, by their processes.
        self.deaths: dict[int, float] = {}
        self._ids: dict[str, UUID] = {}
        super().__init__(*arguments, **options)

    @property
    def id(self) -> UUID:
        """The id of the row of the present child."""
        name, *_ = self.children[-1]
        if name not in self._ids:
            self._ids[name] = Worker.objects.get(name=name).pk
        return self._ids[name]

    @property
    def child(self) -> int:
        """The process of the present child."""
        return self.children[-1][1]

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := IS_READY.search(line):
                self.children.append((found[1], int(found[2]), found[3]))
            if found := HAS_ENDED.search(line):
                self.deaths[int(found[2])] = moment_of(found[1])
            self.lines.append(line)
        # The pipe ends with the processes.
        self.ended_at = time.time()


def moment_of(date: str) -> float:
    """Return the moment of a line of the log; now, if the clock of its process is wrong."""
    now = time.time()
    try:
        moment = datetime.strptime(date, "%Y-%m-%d %H:%M:%S,%f").astimezone().timestamp()
    except ValueError:
        return now
    return moment if abs(now - moment) < 60 else now


def state_of(pid: int) -> str:
    """Return the state of a process, one letter: T if it is stopped. Linux."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]


@dataclass
class Fault:
    """A fault: its victim, its moment, and the tasks that the victim had claimed at that moment."""

    victim: UUID | None
    at: float
    in_flight: set[int]


def begins(since: float) -> set[tuple[UUID, str]]:
    """Return the workers, each with its threads, that have begun a task since a moment."""
    runs = Run.objects.filter(started_at__gte=datetime.fromtimestamp(since, timezone.utc))
    return set(runs.values_list("worker", "thread"))


def run_row(run: Run) -> RunRow:
    """Return a run as evidence."""
    began, ended = run.started_at.timestamp(), run.ended_at and run.ended_at.timestamp()
    return RunRow(run.task, run.attempt, run.worker, began, ended, run.key, run.is_atomic, run.thread)


class Experiment:
    """A database, workers, and a load of tasks. What is shown goes into ``rows``.

    ``is_forked``: a process that has loaded the project forks the workers.
    """

    def __init__(
        self, server: PrivatePostgres, fault: str, rows: list[Row], *, is_short: bool, is_forked: bool = True
    ) -> None:
        self.server = server
        self.fault_name = fault
        self.rows = rows
        self.is_short = is_short
        self.is_forked = is_forked
        self.started: list[ChaosWorker] = []
        self.enqueued: list[int] = []
        self._stopped: dict[UUID, float] = {}
        self._absences: list[Absence] = []

    # The workers and their load

    def worker(
        self, *arguments: str, url: str | None = None, pglock: dict[str, Any] | None = None, **environment: str
    ) -> ChaosWorker:
        """Start a worker and wait until it is ready. ``pglock`` are settings; all others are at their defaults."""
        return self.wait_until_ready(self.start(*arguments, url=url, pglock=pglock, **environment))

    def workers(self, count: int, *arguments: str, **options: Any) -> list[ChaosWorker]:
        """Start several workers alike."""
        return [self.wait_until_ready(worker) for worker in [self.start(*arguments, **options) for _ in range(count)]]

    def start(
        self, *arguments: str, url: str | None = None, pglock: dict[str, Any] | None = None, **environment: str
    ) -> ChaosWorker:
        """Start a worker, and do not wait for it."""
        variables = {**ENVIRONMENT, "CHAOS_PGLOCK": json.dumps(pglock or {}), **environment}
        worker = ChaosWorker(*arguments, url=url or self.server.url, is_forked=self.is_forked, **variables)
        self.started.append(worker)
        worker.start_replacement = lambda: self.worker(*arguments, url=url, pglock=pglock, **environment)
        return worker

    def wait_until_ready(self, worker: ChaosWorker) -> ChaosWorker:
        """Wait until a worker is ready."""
        worker.wait_for("is ready")
        assert worker.id
        return worker

    def load(self, count: int, seconds: float = 0.05) -> list[int]:
        """Enqueue so many tasks of each of the three kinds: plain, atomic, and with keys."""
        results = []
        with transaction.atomic():
            for number in range(count):
                results.append(chaos_tasks.work.enqueue(seconds))
                results.append(chaos_tasks.work_atomically.enqueue(seconds))
                results.append(chaos_tasks.work_alone.enqueue(str(number % KEYS), seconds))
        return self.expect(*results)

    def under_load(self, is_seen: Callable[[], Any], seconds: float = 0.05) -> Callable[[], Any]:
        """Return a condition for ``eventually`` that also enqueues more tasks when few are left.

        On a slow machine a load of fixed size may be done before the first check.
        """

        def look() -> Any:
            if Task.objects.filter(status="READY").count() < PLENTY:
                self.load(PLENTY // 2, seconds)
            return is_seen()

        return look

    def all_begin(self, workers: Iterable[ChaosWorker], since: float) -> Callable[[], bool]:
        """Return the condition for ``eventually`` that each worker has begun a task since a moment, under load."""
        return self.under_load(lambda: {worker.id for worker in workers} <= {id_ for id_, _ in begins(since)})

    def all_threads_begin(self, workers: Collection[ChaosWorker], since: float, threads: int) -> Callable[[], bool]:
        """Return the condition for ``eventually`` that each of so many ``threads`` of each worker has begun a task."""

        def have_begun() -> bool:
            begun = Counter(id_ for id_, _ in begins(since))
            return all(begun[worker.id] == threads for worker in workers)

        return self.under_load(have_begun)

    def expect(self, *results: Any) -> list[int]:
        """Record tasks that were enqueued: each of them must end."""
        ids = [int(result.id) for result in results]
        self.enqueued += ids
        return ids

    # The faults

    def send_signal(self, worker: ChaosWorker, number: signal.Signals) -> Fault:
        """Send a signal: SIGKILL and SIGSTOP in the middle of a task. Return when it has happened.

        A worker that is stopped or continues is so with its child, as with its host.
        """
        is_hard = number in (signal.SIGKILL, signal.SIGSTOP)
        in_flight = self.stop_at_work(worker.child, worker.id) if is_hard else set()
        at = time.time()
        if number == signal.SIGCONT:
            os.kill(worker.child, number)
        worker.send(number)
        if number == signal.SIGKILL:
            worker.wait()
        if number == signal.SIGSTOP:
            self._stopped[worker.id] = at
        elif number == signal.SIGCONT:
            self._absences.append(Absence(worker.id, self._stopped.pop(worker.id), at))
        return Fault(worker.id, at, in_flight if is_hard else self.in_flight(worker.id))

    def stop_at_work(self, pid: int, worker: UUID) -> set[int]:
        """Stop a child in the middle of a task, and return the tasks that it has claimed.

        If it was between two tasks, it continues for a moment. Without that, its tasks may end before the signal comes,
        and then nothing shows what becomes of them. Returns nothing if the worker has nothing to do.
        """
        for _ in range(500):
            os.kill(pid, signal.SIGSTOP)
            while state_of(pid) != "T":
                time.sleep(0.001)
            in_flight = self.in_flight(worker)
            if Run.objects.filter(worker=worker, ended_at=None, task__in=in_flight).exists():
                return in_flight
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.01)
        return set()

    def out_of_reach(self, worker: UUID, since: float, until: float) -> None:
        """Note that a worker was cut off for some time. Its runs of that time had computed everything before."""
        self._absences.append(Absence(worker, since, until, is_cut_off=True))

    def in_flight(self, worker: UUID) -> set[int]:
        """Return the tasks that a worker has claimed."""
        return set(Task.objects.filter(status="RUNNING", worker=worker).values_list("pk", flat=True))

    # How the tasks progress

    def running(self, count: int = 1) -> bool:
        """Return whether ``count`` runs have begun."""
        return Run.objects.count() >= count

    def is_over(self) -> bool:
        """Return whether every task is finished."""
        return not Task.objects.exclude(status__in=FINISHED).exists()

    # The evidence

    def evidence(self) -> Evidence:
        """Read the tables."""
        return Evidence(
            enqueued=self.enqueued,
            tasks=[TaskRow(task.pk, task.status, task.attempts, task.result) for task in Task.objects.all()],
            runs=[run_row(run) for run in Run.objects.all()],
            absences=self.absences(),
        )

    def absences(self) -> list[Absence]:
        """Return the times at which workers were dead, stopped or cut off."""
        return [
            *self._absences,
            *(Absence(worker, since) for worker, since in self._stopped.items()),
            *self._dead(),
        ]

    def _dead(self) -> Iterator[Absence]:
        known = {worker.hex[:8]: worker for worker in Run.objects.values_list("worker", flat=True).distinct()}
        for worker in self.started:
            for _, process, start in worker.children:
                at = worker.deaths.get(process, worker.ended_at)
                if at is not None and start in known:
                    yield Absence(known[start], at)

    def judge(self, guarantee: str = NOTHING_WRONG, **exceptions: Any) -> Evidence:
        """Show that no guarantee was violated, and return the evidence. ``exceptions`` go to ``Evidence.findings``."""
        evidence = self.evidence()
        findings = evidence.findings(**exceptions)
        self.rows.append(Row(self.fault_name, guarantee, None, None, not findings))
        assert not findings, "\n".join([*map(str, findings), *self._history(finding.task for finding in findings)])
        return evidence

    def _history(self, tasks: Iterable[int]) -> Iterator[str]:
        for attempt in Attempt.objects.filter(task__in=list(tasks)).order_by("task", "number"):
            yield f"{attempt!r} from {attempt.started_at} to {attempt.finished_at}\n{attempt.traceback}"

    def show(self, guarantee: str, measured: float, bound: float) -> None:
        """Show that something did not take longer than ``limit``.

        The short form may run on a slow and busy machine. There it fails only if something never happens.
        """
        if self.is_short:
            bound = max(10 * bound, 60.0)
        self.rows.append(Row(self.fault_name, guarantee, bound, measured, measured <= bound))
        assert measured <= bound, f"{guarantee}: after {measured:.1f} s instead of {bound:.1f} s"

    def affirm(self, guarantee: str, *, is_kept: bool) -> None:
        """Show that something is so, or is not."""
        self.rows.append(Row(self.fault_name, guarantee, None, None, is_kept))
        assert is_kept, f"It is not so: {guarantee}."

    # The end

    def clear(self) -> None:
        """Empty the tables."""
        names = [
            connection.ops.quote_name(model._meta.db_table)
            for model in (Run, Attempt, Waiter, Task, Worker, RateLimit, Queue)
        ]
        execute_sql(f"TRUNCATE {', '.join(names)} CASCADE")

    def close(self) -> None:
        """End the processes that are left."""
        for worker in self.started:
            worker.end()
