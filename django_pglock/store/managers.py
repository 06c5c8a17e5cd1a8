"""The managers of tasks, schedules, queues, workers and the history, such as ``Task.objects``.

Each method calls one function of this folder. Projects, the admin and the commands call the methods. The admin and the
commands also call some functions directly. The worker calls only functions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from django.db import models
from django.utils.asyncio import async_unsafe

from django_pglock.store import liveness, schedules
from django_pglock.store.claim_manager import LockingQuerySet
from django_pglock.store.count import QueueCounts, count_workable, queue_counts
from django_pglock.store.failures import MOST_GROUPS, FailureCounts, failures
from django_pglock.store.numbers import Point, Total, series, totals
from django_pglock.store.operate import VERBS, Verb, operate, stuck
from django_pglock.store.pause import pause, paused, resume
from django_pglock.store.prune import prune
from django_pglock.store.ready import UnknownTasks, due, ready, unknown
from django_pglock.store.statements import MOST_COUNTED, WINDOW, Progress

if TYPE_CHECKING:
    from typing_extensions import Self

F = TypeVar("F", bound=Callable[..., Any])


def for_writing(rows: Any) -> Any:
    """Return a queryset in the database for writes. A router may send reads to a replica, which may be late."""
    # A queryset that locks rows is one that writes.
    return rows.using(rows.select_for_update().db)


def blocking(verb: F) -> F:
    """Let a verb say in a coroutine what to await instead. Django's error would not name it."""
    name = verb.__name__
    guarded: F = async_unsafe(f"{name}() blocks the event loop here. Write: await sync_to_async(rows.{name})(…)")(verb)
    return guarded


class TaskQuerySet(LockingQuerySet[Any]):
    """Tasks, and the operations on tasks: the verbs of operate.py are methods, too.

    It has only ``claim`` of the methods of ``ClaimQuerySet``. The others would change the status of a task without the
    steps that belong to it, such as the release of the tasks that wait for it.
    """

    # Sets

    def ready(self) -> Self:
        """Return the tasks that can be claimed now, in the order in which they run: by priority, then as enqueued."""
        tasks: Self = ready(self)
        return tasks

    def due(self) -> Self:
        """Return the scheduled tasks whose time has come, the longest overdue first."""
        tasks: Self = due(self)
        return tasks

    def stuck(self) -> Self:
        """Return the running tasks whose worker has sent no heartbeat for ``HEARTBEAT_LIMIT``, or has no row."""
        tasks: Self = stuck(self)
        return tasks

    # Verbs

    @blocking
    def prune(
        self,
        *,
        older_than: float | None = None,
        statuses: Collection[str] = (),
        batch: int = WINDOW,
        dry_run: bool = False,
        progress: Progress | None = None,
    ) -> int:
        """Delete finished tasks of this queryset that are old enough, with their attempts. Returns how many.

        - ``older_than``: days since they finished; None: the value of ``PRUNE_AFTER`` for each status.
        - ``statuses``: only these statuses; none: those that ``PRUNE_AFTER`` does not keep forever.
        - ``batch``: the number of rows that one statement reads.
        - ``dry_run``: delete nothing, only count, up to 10,001.
        - ``progress``: called after each batch, with the number of tasks so far and the last id that was read.

        A task with ``keep_result`` is deleted when that time is over, whatever its age. Call it outside
        of a transaction. Inside of one, all batches are one batch. Raises ``ValueError``.
        """
        return prune(
            for_writing(self),
            older_than=older_than,
            statuses=statuses,
            batch=batch,
            dry_run=dry_run,
            progress=progress,
        )


_METHOD = """{help}

Returns how many. {about}

A task whose row another transaction has locked, or whose unique key it is taking, is left out. Some thousand tasks are
changed at a time. Outside of a transaction, each time is a transaction, so after an interruption the finished ones
stay. ``progress`` is called after each, with the number of tasks so far and the last id.
"""


def _method(verb: Verb) -> Callable[..., int]:
    """Return a verb as a method of querysets."""

    def change(self: Any, *, progress: Progress | None = None) -> int:
        return operate(for_writing(self), verb, progress=progress)

    def change_to(self: Any, queue: str, *, progress: Progress | None = None) -> int:
        return operate(for_writing(self), verb, queue, progress=progress)

    method = change_to if verb.extra else change
    method.__name__, method.__qualname__ = verb.name, f"TaskQuerySet.{verb.name}"
    method.__doc__ = _METHOD.format(help=verb.help, about=verb.about)
    return blocking(method)


for _verb in VERBS.values():
    setattr(TaskQuerySet, _verb.name, _method(_verb))


class TaskManager(models.Manager.from_queryset(TaskQuerySet)):  # type: ignore[misc]
    """The manager of ``Task``. Its own methods read all tasks of a database, so a filtered queryset lacks them."""

    def unknown(self, *, limit: int = 1000) -> list[UnknownTasks]:
        """Return the ready tasks whose function no living worker knows, the longest waiting first.

        The first ``limit`` tasks of each queue are read, by index. This does not check whether a worker that knows a
        function also serves the queue.
        """
        return unknown(self.db, limit=limit)

    def queue_counts(self, *, most: int = MOST_COUNTED) -> list[QueueCounts]:
        """Return the counts of each queue that has unfinished or failed tasks, or is paused, in the order of the names.

        At most ``most`` ready tasks of each queue are counted, ``most`` failed tasks of each group of failures, and
        ``most`` tasks of each other status in all queues together.
        """
        return queue_counts(self.db, most=most)

    def failures(self, *, limit: int = MOST_GROUPS, most: int = MOST_COUNTED) -> list[FailureCounts]:
        """Return the failed tasks in groups of one function, exception and place: the latest failures first.

        - ``limit``: the largest number of groups that are returned. They are chosen from at most a thousand.
        - ``most``: the largest number of tasks that are counted in a group.
        """
        return failures(self.db, limit=limit, most=most)

    def count_workable(self, queues: Collection[str] = (), *, most: int = MOST_COUNTED) -> int:
        """Return how many tasks of these queues (none: of all) a worker could start now: ready tasks and due tasks.

        Paused queues are not counted. At most ``most`` ready tasks of each queue are counted, and ``most`` due tasks in
        all queues together.
        """
        return count_workable(self.db, queues, most=most)


class ScheduleQuerySet(models.QuerySet[Any]):
    """Schedules, and the operations on schedules."""

    @blocking
    def enable(self) -> int:
        """Enable the disabled schedules of this queryset. Returns how many. Ticks that have passed are not run."""
        return schedules.enable(for_writing(self))

    @blocking
    def disable(self) -> int:
        """Disable the enabled schedules of this queryset. Returns how many. Disabled schedules enqueue no tasks."""
        return schedules.disable(for_writing(self))

    @blocking
    def run_now(self) -> list[int]:
        """Enqueue each function of this queryset that this process knows once, whatever its dates are.

        The schedules are not changed. Returns the ids of the tasks. A task that ``unique=`` has refused is missing.
        """
        return schedules.run_now(for_writing(self))


class ScheduleManager(models.Manager.from_queryset(ScheduleQuerySet)):  # type: ignore[misc]
    """The manager of ``Schedule``."""


class QueueQuerySet(models.QuerySet[Any]):
    """Queues, and the operations on queues."""

    def paused(self) -> Self:
        """Return the queues from which no worker claims tasks."""
        queues: Self = paused(self)
        return queues


class QueueManager(models.Manager.from_queryset(QueueQuerySet)):  # type: ignore[misc]
    """The manager of ``Queue``. It pauses and resumes queues by name."""

    @blocking
    def pause(self, name: str, *, by: str = "", reason: str = "") -> bool:
        """Stop workers from claiming tasks of the queue ``name``. Return whether the queue was not paused before.

        Tasks that are already claimed run to their end. A queue that does not have tasks yet can be paused, too. Raises
        ``ValueError`` for an invalid name, for a name that ends in ``*`` and that no queue has, and for a reason that
        PostgreSQL cannot store.
        """
        return pause(for_writing(self).db, name, by=by, reason=reason)

    @blocking
    def resume(self, name: str) -> bool:
        """Let workers claim from the queue again, at once. Return whether it was paused. Raises as ``pause`` does."""
        return resume(for_writing(self).db, name)


class WorkerQuerySet(models.QuerySet[Any]):
    """Workers, by their heartbeats."""

    def alive(self) -> Self:
        """Return the workers that have sent a heartbeat within the hard limit, ``HEARTBEAT_LIMIT``."""
        workers: Self = liveness.alive(self)
        return workers


class WorkerManager(models.Manager.from_queryset(WorkerQuerySet)):  # type: ignore[misc]
    """The manager of ``Worker``."""


class NumberManager(models.Manager[Any]):
    """The manager of ``Number``, whose rows are written by workers."""

    def series(
        self,
        since: datetime,
        until: datetime,
        step: timedelta | float,
        *,
        queue: str | None = None,
        task_path: str | None = None,
    ) -> list[Point]:
        """Return the attempts that ended between two moments, in steps of ``step`` seconds. Each step has a point.

        ``queue`` and ``task_path`` choose one queue, one function, or one function in one queue. Steps are whole
        minutes. Minutes are stored for two days, hours for ninety. If ``step`` is a whole number of hours, hours are
        read. Raises ``ValueError`` for another step, and for more than 10,000 steps.
        """
        return series(self.db, since, until, step, queue, task_path)

    def totals(
        self,
        since: datetime,
        until: datetime,
        *,
        by_function: bool = True,
        queue: str | None = None,
        task_path: str | None = None,
    ) -> list[Total]:
        """Return the attempts that ended between two moments, by queue and function, or only by queue.

        The rows with most attempts are first. Up to three hours are read from the minutes, longer times from the hours.
        The minutes or hours that contain ``since`` and ``until`` are counted as a whole.
        """
        return totals(self.db, since, until, by_function=by_function, queue=queue, task_path=task_path)
