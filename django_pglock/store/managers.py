"""What ``Task.objects`` and the managers of schedules, queues, workers and of the history offer to people.

Each method asks one verb of this folder. The worker and the doors ask the verbs themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.db import models

from django_pglock.store import liveness, schedule_run_now, schedule_switch
from django_pglock.store.cancel import cancel
from django_pglock.store.claim_manager import HoldingQuerySet
from django_pglock.store.count import MOST_COUNTED, QueueCounts, count_workable, queue_counts
from django_pglock.store.delete import delete
from django_pglock.store.discard import discard
from django_pglock.store.failures import MOST_GROUPS, FailureCounts, failures
from django_pglock.store.history import Point, Total, series, totals
from django_pglock.store.move_to_queue import move_to_queue
from django_pglock.store.move_to_status import WINDOW
from django_pglock.store.pause import pause, paused, resume
from django_pglock.store.promote import due
from django_pglock.store.prune import prune
from django_pglock.store.ready import ready
from django_pglock.store.reset_stuck import reset_stuck, stuck
from django_pglock.store.retry import retry
from django_pglock.store.run_now import run_now
from django_pglock.store.unknown import UnknownTasks, unknown

if TYPE_CHECKING:
    from typing_extensions import Self


class TaskQuerySet(HoldingQuerySet[Any]):
    """Tasks, and what a person may ask of them.

    Of the verbs for tables of your own it has ``claim`` alone. The others would change the status of a task without
    what belongs to it, such as the release of the tasks that wait for it.
    """

    # Sets

    def ready(self) -> Self:
        """Tasks that can be claimed now, in the order in which they run: by priority, then as enqueued."""
        tasks: Self = ready(self)
        return tasks

    def due(self) -> Self:
        """Scheduled tasks whose time has come, the longest overdue first."""
        tasks: Self = due(self)
        return tasks

    def stuck(self) -> Self:
        """Running tasks whose worker has sent no heartbeat for ``HEARTBEAT_LIMIT``, or has no row."""
        tasks: Self = stuck(self)
        return tasks

    def unknown(
        self, *, limit: int = 1000, worker: UUID | None = None, backend: str | None = None
    ) -> list[UnknownTasks]:
        """Return which ready tasks no living worker knows, the longest waiting first.

        - ``limit``: so many tasks of each queue are read, the first ones, by index.
        - ``worker``: return the tasks that this worker does not know, whatever others do.
        - ``backend``: only tasks of this alias in TASKS.

        All tasks of the database are meant, whatever the queryset selects. Whether a worker that knows a function also
        serves the queue is not asked.
        """
        return unknown(self.db, limit=limit, worker=worker, backend=backend)

    # Verbs

    def retry(self, *, progress: Callable[[int, int], None] | None = None) -> int:
        """Make failed and cancelled tasks of this queryset READY again, with all their retries and snoozes.

        Returns how many. A task with ``after=`` waits again for those tasks that have not succeeded; if one of them has
        failed and is not retried as well, it is cancelled again. A unique task is not retried while another task has
        its key; of several with one key, only the last is retried.

        Outside of a transaction some thousands are moved at a time, each time by a transaction of its own, so an
        interruption keeps what is done. ``progress`` is called after each, with the number so far and the last id.
        """
        return retry(self, progress=progress)

    def cancel(self, *, progress: Callable[[int, int], None] | None = None) -> int:
        """Cancel the waiting tasks of this queryset, and ask the running ones to end. Returns how many of both.

        A waiting task will never run. A running task stays RUNNING until its worker, once this is committed, has passed
        on the request and the function has ended: CANCELLED if it raised, SUCCESSFUL if it returned nevertheless.

        Some thousands at a time, and ``progress``: as in ``retry``, but the newest first.
        """
        return cancel(self, progress=progress)

    def discard(self, *, progress: Callable[[int, int], None] | None = None) -> int:
        """Cancel the failed tasks of this queryset, so that they are no longer among the failures. Returns how many.

        Some thousands at a time, and ``progress``: as in ``retry``.
        """
        return discard(self, progress=progress)

    def move_to_queue(self, queue: str, *, progress: Callable[[int, int], None] | None = None) -> int:
        """Move waiting tasks of this queryset to another queue. Returns how many.

        Running and finished tasks stay where they are. Some thousands at a time, and ``progress``: as in ``retry``.
        Raises ``ValueError`` for a queue that ``QUEUES`` of no backend of this database lists.
        """
        return move_to_queue(self, queue, progress=progress)

    def delete_finished(self, *, progress: Callable[[int, int], None] | None = None) -> int:
        """Delete finished tasks of this queryset with their attempts, whatever their age. Returns how many.

        A task stays if others wait for it, if its unique key is taken for a period, or if a row of the project or a
        trigger refuses its deletion. Some thousands at a time, and ``progress``: as in ``retry``.
        """
        return delete(self, progress=progress)

    def run_now(self, *, progress: Callable[[int, int], None] | None = None) -> int:
        """Make scheduled tasks of this queryset READY, before their time. Returns how many.

        Some thousands at a time, and ``progress``: as in ``retry``.
        """
        return run_now(self, progress=progress)

    def reset_stuck(self) -> int:
        """Make stuck tasks of this queryset READY again: running ones whose worker is gone. Returns how many.

        Tasks of a living worker are not reset. A worker that comes back later finds its claim lost. A task that
        somebody has asked to end is CANCELLED instead.
        """
        return reset_stuck(self)

    def prune(
        self,
        *,
        older_than: float | None = None,
        statuses: Collection[str] = (),
        batch: int = WINDOW,
        dry_run: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> int:
        """Delete finished tasks of this queryset that are old enough, with their attempts. Returns how many.

        - ``older_than``: days since they finished; None: what ``PRUNE_AFTER`` says for each status.
        - ``statuses``: only these; none: those that ``PRUNE_AFTER`` does not keep forever.
        - ``batch``: rows that one statement looks at.
        - ``dry_run``: delete nothing, only count, up to 10,001.
        - ``progress``: called after each batch, with the number so far and the id that the walk has reached.

        A task with ``keep_result`` is deleted when that time is over, whatever its age. A task whose deletion is
        refused, for example by a trigger of the project, stays, and the log names one with the reason. Call it outside
        of a transaction, else all batches are one, and the first refusal raises. Raises ``ValueError``.
        """
        return prune(self, older_than=older_than, statuses=statuses, batch=batch, dry_run=dry_run, progress=progress)

    # Counts, of all tasks of the database, whatever the queryset selects

    def queue_counts(self, *, most: int = MOST_COUNTED) -> list[QueueCounts]:
        """Return what is in each queue that has unfinished or failed tasks, or is paused, by name.

        At most ``most`` tasks are counted: of ready and of failed ones, in each queue; of each other status, in all.
        """
        return queue_counts(self.db, most=most)

    def failures(
        self, *, limit: int = MOST_GROUPS, most: int = MOST_COUNTED, with_muted: bool = True
    ) -> list[FailureCounts]:
        """Return the failed tasks in groups of one function, exception and place: the latest failures first.

        - ``limit``: at most so many groups are returned, chosen among a thousand.
        - ``most``: at most so many tasks of a group are counted, and 500 of all those without a fingerprint.
        - ``with_muted``: True puts the muted groups last, False leaves them out.
        """
        return failures(self.db, limit=limit, most=most, with_muted=with_muted)

    def count_workable(self, queues: Collection[str] = (), *, most: int = MOST_COUNTED) -> int:
        """Return how many tasks of these queues (none: of all) a worker could start now: ready ones and due ones.

        Paused queues are not counted, and at most ``most`` ready tasks of each queue and ``most`` due ones in all.
        """
        return count_workable(self.db, queues, most=most)


class TaskManager(models.Manager.from_queryset(TaskQuerySet)):  # type: ignore[misc]
    """The manager of ``Task``."""


class ScheduleQuerySet(models.QuerySet[Any]):
    """Schedules, and what a person may ask of them."""

    def enable(self) -> int:
        """Enable the disabled ones of this queryset. Returns how many. Ticks that have passed are not run."""
        return schedule_switch.enable(self)

    def disable(self) -> int:
        """Enqueue no tasks of these schedules until they are enabled again. Returns how many were enabled."""
        return schedule_switch.disable(self)

    def run_now(self) -> list[int]:
        """Enqueue the functions of this queryset that this process knows, once each, whatever their dates are.

        The schedules stay as they are. Returns the ids of the tasks, without those that ``unique=`` has refused.
        """
        return schedule_run_now.run_now(self)


class ScheduleManager(models.Manager.from_queryset(ScheduleQuerySet)):  # type: ignore[misc]
    """The manager of ``Schedule``."""


class QueueQuerySet(models.QuerySet[Any]):
    """Queues, and what a person may ask of them."""

    def paused(self) -> Self:
        """Queues from which no worker claims anything."""
        queues: Self = paused(self)
        return queues

    def pause(self, name: str, *, by: str = "", reason: str = "") -> bool:
        """Let no worker claim from the queue ``name`` until it is resumed; say whether it was not paused before.

        Tasks that are claimed already run to their end. A queue that nobody has used yet can be paused, too. Raises
        ``ValueError`` for an invalid name, for a name that ends in ``*`` and that no queue has, and for a reason
        that PostgreSQL cannot store.
        """
        return pause(self.db, name, by=by, reason=reason)

    def resume(self, name: str) -> bool:
        """Let workers claim from the queue again, at once; say whether it was paused. Raises as ``pause`` does."""
        return resume(self.db, name)


class QueueManager(models.Manager.from_queryset(QueueQuerySet)):  # type: ignore[misc]
    """The manager of ``Queue``."""


class WorkerQuerySet(models.QuerySet[Any]):
    """Workers by what is known of their lives."""

    def alive(self) -> Self:
        """Workers that have sent a heartbeat within the hard limit, ``HEARTBEAT_LIMIT``."""
        workers: Self = liveness.alive(self)
        return workers

    def silent(self) -> Self:
        """Workers that have sent no heartbeat for longer than the hard limit."""
        workers: Self = liveness.silent(self)
        return workers


class WorkerManager(models.Manager.from_queryset(WorkerQuerySet)):  # type: ignore[misc]
    """The manager of ``Worker``."""


class HistoryQuerySet(models.QuerySet[Any]):
    """The history of attempts. Its rows are written by workers."""

    def series(
        self,
        since: datetime,
        until: datetime,
        step: timedelta | float,
        *,
        queue: str | None = None,
        task_path: str | None = None,
    ) -> list[Point]:
        """Return what ended between two moments in steps of ``step`` seconds, one point a step.

        ``queue`` and ``task_path`` choose one queue, one function, or one function in one queue. Steps are whole
        minutes. Minutes are kept for two days and hours for ninety: with a step of whole hours, hours are read. Raises
        ``ValueError`` for another step, and for more than 10,000 steps.
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
        """Return what ended between two moments, by queue and function, or by queue alone; most attempts first.

        Up to three hours are read by the minute, more by the hour. The periods in which ``since`` and ``until`` lie are
        read as a whole.
        """
        return totals(self.db, since, until, by_function=by_function, queue=queue, task_path=task_path)


class HistoryManager(models.Manager.from_queryset(HistoryQuerySet)):  # type: ignore[misc]
    """The manager of ``TaskHistory``."""
