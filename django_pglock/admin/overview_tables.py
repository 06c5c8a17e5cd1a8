"""The tables of the overview: the active queues, and the workers with their running tasks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import groupby

from django.utils import timezone
from django.utils.translation import gettext as _

from django_pglock.admin.overview_facts import MOST_RUNNING, MOST_WORKERS, Facts, RunningTask
from django_pglock.admin.pages import AtLeast, elapsed
from django_pglock.models import Task, Worker
from django_pglock.tasks.compat import task_backends

#: The number of rows of a table, and of tasks of one worker, that are shown.
MOST_SHOWN, FEW = 20, 3


@dataclass(frozen=True)
class QueueRow:
    """One queue: how many tasks are ready, run and have failed, and how long the oldest has been ready."""

    name: str
    ready: int
    oldest: str
    running: int
    #: Finished tasks per minute.
    rate: str
    failed: int
    paused_at: datetime | None
    #: Addresses of the lists of its ready and its failed tasks.
    ready_url: str
    failed_url: str


@dataclass(frozen=True)
class WorkerRow:
    """One living worker: which queues it serves, its first running tasks, and how many more run."""

    name: str
    url: str
    queues: str
    since: str
    is_stopping: bool
    tasks: list[tuple[str, str]]
    more: int


@dataclass(frozen=True)
class QueueTable:
    """Some queues, and the number of all."""

    rows: list[QueueRow]
    more: int


@dataclass(frozen=True)
class WorkerTable:
    """Some workers, the number of all, and how many tasks they run."""

    rows: list[WorkerRow]
    count: int
    more: int
    running: int


def queue_table(facts: Facts) -> QueueTable:
    """Return the queues, the urgent ones first: with the oldest ready tasks, paused, with running tasks, configured."""
    configured = [queue for backend in task_backends.all() for queue in sorted(backend.queues)]
    running = [queue for queue, each in facts.depths.items() if each.counts["RUNNING"]]
    names = list(dict.fromkeys([*facts.ages, *facts.paused, *running, *configured]))
    shown = names[:MOST_SHOWN]
    rates, now = facts.rates(shown), timezone.now()
    rows = []
    for name in shown:
        age, paused = facts.ages.get(name), facts.paused.get(name)
        row = QueueRow(
            name=name,
            ready=_count(facts, name, "READY"),
            oldest="-" if age is None else elapsed(now - timedelta(seconds=age), now),
            running=_count(facts, name, "RUNNING"),
            rate=f"{rates.get(name, 0):,.{0 if rates.get(name, 0) >= 10 else 1}f}",
            failed=_count(facts, name, "FAILED"),
            paused_at=paused.paused_at if paused else None,
            ready_url=facts.address("task_changelist", status__exact="READY", queue=name),
            failed_url=facts.address("task_changelist", status__exact="FAILED", queue=name),
        )
        rows.append(row)
    return QueueTable(rows, len(names) - len(shown))


def _count(facts: Facts, queue: str, status: str) -> int:
    depth = facts.depths.get(queue)
    if depth is None:
        return 0
    return AtLeast(depth.counts[status]) if status in depth.at_least else depth.counts[status]


def worker_table(facts: Facts) -> WorkerTable:
    """Return the workers, those with running tasks first. With their tasks, if the user may view tasks."""
    running = facts.running if facts.may_view(Task) else []
    tasks = {worker: list(group) for worker, group in groupby(running, key=lambda task: task.worker)}
    workers = sorted(facts.workers, key=lambda worker: (worker.pk not in tasks, worker.name))
    rows = [_worker_row(facts, worker, tasks.get(worker.pk, [])) for worker in workers[:MOST_SHOWN]]
    count = AtLeast(MOST_WORKERS) if len(workers) >= MOST_WORKERS else len(workers)
    busy = AtLeast(MOST_RUNNING) if len(running) >= MOST_RUNNING else len(running)
    return WorkerTable(rows, count, len(workers) - len(rows), busy)


def _worker_row(facts: Facts, worker: Worker, running: list[RunningTask]) -> WorkerRow:
    oldest = sorted(running, key=lambda task: task.since)
    return WorkerRow(
        name=worker.name,
        url=facts.address("worker_change", worker.pk),
        queues=", ".join(worker.queues) or _("all"),
        since=elapsed(worker.started_at),
        is_stopping=worker.is_stopping,
        tasks=list(_shown_tasks(facts, oldest[:FEW])),
        more=len(oldest) - FEW,
    )


def _shown_tasks(facts: Facts, running: list[RunningTask]) -> Iterator[tuple[str, str]]:
    """Yield the text and the address of each task."""
    for task in running:
        text = _("%(task)s #%(id)s for %(time)s") % {"task": task.name, "id": task.id, "time": elapsed(task.since)}
        yield text, facts.address("task_change", task.id)
