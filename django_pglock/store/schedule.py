"""The verbs of schedules: register, enqueue what is due, enable, disable, run now.

A tick is taken by moving ``next_at`` on from it, in the transaction in which its task is enqueued. Of any number of
workers one finds the date that it has read; the others find another one, or that somebody is at it.
"""

from __future__ import annotations

import logging
import time
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, NamedTuple

from django.db import InterfaceError, OperationalError, connections, models, transaction

from django_pglock.errors import DuplicateTask
from django_pglock.store import statements
from django_pglock.store.claim_manager import ClaimQuerySet
from django_pglock.tasks import registry
from django_pglock.tasks.schedules import Timing, timing_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from django_pglock.tasks.definition import PostgresTask

logger = logging.getLogger("django_pglock.tasks")


class Row(NamedTuple):
    """A schedule as it was read, with the time that it was then. Dates are UTC."""

    path: str
    is_enabled: bool
    next_at: datetime
    now: datetime
    #: The first tick after now: what was missed is made up for by one run.
    following: datetime

    @property
    def is_due(self) -> bool:
        """Its tick has come."""
        return self.is_enabled and self.next_at <= self.now


class Ticks(NamedTuple):
    """What came of a look at the schedules: the ids of the tasks, and the seconds until the next tick, if any."""

    tasks: list[int]
    next_in: float | None


class ScheduleQuerySet(ClaimQuerySet[Any]):
    """Schedules."""

    def known(self) -> dict[str, PostgresTask]:
        """Return the scheduled functions that this process knows and whose tasks live in this database, by path."""
        tasks = registry.scheduled()
        return {task.module_path: task for task in tasks if getattr(task.get_backend(), "database", None) == self.db}

    def timings(self) -> dict[str, Timing]:
        """Return when the known functions run, as the code says it."""
        return {path: timing_of(task) for path, task in self.known().items()}

    def register(self) -> list[str]:
        """Write down the schedules of the known functions; return the paths of those that are new or have changed.

        A new one counts from now on, and so does one whose expression or zone has changed.
        """
        timings = self.timings()
        if not timings:
            return []
        now = self._now()
        first = [timing.following(now, now) for timing in timings.values()]
        expressions, zones = zip(*timings.values(), strict=True)
        values = (list(timings), list(expressions), list(zones), first)
        return [path for (path,) in self._run(statements.REGISTER_SCHEDULES, *values)]

    def enqueue_due(self) -> Ticks:
        """Enqueue one task for each known function whose tick has come, however many ticks were missed.

        Each in a transaction of its own, so that what fails fails alone; therefore not inside ``atomic()``. A tick that
        cannot be enqueued, as with ``unique=`` and ``"raise"``, is skipped, and the log says so; one that failed by the
        database's fault is still due in the next look.
        """
        tasks, looked = self.known(), time.monotonic()
        rows = self._rows(tasks)
        enqueued = [self._try_tick(tasks[row.path], row) for row in rows if row.is_due]
        # Of what failed, or is being enqueued by somebody else, the next tick: to look again at once would be to spin.
        waits = ((row.following - row.now).total_seconds() for row in rows if row.is_enabled)
        next_in = min(waits, default=None)
        if next_in is not None:
            next_in -= time.monotonic() - looked
        return Ticks([id_ for id_ in enqueued if id_ is not None], next_in)

    def _try_tick(self, task: PostgresTask, row: Row) -> int | None:
        try:
            with transaction.atomic(using=self.db, durable=True):
                return self._take_tick(task, row)
        except (OperationalError, InterfaceError) as error:
            text = "The tick of %s at %s was not enqueued, and will be tried again: %s"
            logger.warning(text, row.path, row.next_at, str(error).strip())
            return None

    def _take_tick(self, task: PostgresTask, row: Row) -> int | None:
        self._run(statements.LIMIT_TICK)
        due = self.filter(pk=row.path, is_enabled=True, next_at=row.next_at)
        if not due.claim_update(1, next_at=row.following):
            return None
        try:
            id_ = self._enqueue(task, {"schedule": row.next_at.isoformat()})
        except (OperationalError, InterfaceError):
            raise
        except Exception:
            logger.exception("The tick of %s at %s is skipped: it cannot be enqueued.", row.path, row.next_at)
            return None
        if id_ is not None:
            self.filter(pk=row.path).update(last_at=row.next_at, last_task=id_)
        return id_

    def _enqueue(self, task: PostgresTask, meta: dict[str, str]) -> int | None:
        try:
            with transaction.atomic(using=self.db):
                return int(task.using(meta={**task.meta, **meta}).enqueue().id)
        except DuplicateTask as error:
            logger.info("%s is not enqueued by its schedule: %s", task.module_path, error)
            return None

    # What a person may ask for

    def enable(self) -> int:
        """Enable what is disabled in this queryset. Returns how many. Ticks that have passed meanwhile stay undone."""
        disabled = list(self.filter(is_enabled=False).values_list("pk", flat=True))
        return sum(
            self.filter(pk=row.path, is_enabled=False, next_at=row.next_at).update(
                is_enabled=True, next_at=row.following
            )
            for row in self._rows(disabled)
        )

    def disable(self) -> int:
        """Let nothing of this queryset be enqueued by the clock until it is enabled. Returns how many were enabled."""
        return self.filter(is_enabled=True).update(is_enabled=False)

    def run_now(self) -> list[int]:
        """Enqueue the functions of this queryset that this process knows, once, whatever the clock says.

        The schedules stay as they are. Returns the ids of the tasks; what ``unique=`` forbids is left out.
        """
        known = self.known()
        chosen = self.filter(pk__in=known).order_by("pk").values_list("pk", flat=True)
        enqueued = [self._enqueue(known[path], {}) for path in chosen]
        return [id_ for id_ in enqueued if id_ is not None]

    # The database

    def _rows(self, paths: Iterable[str]) -> list[Row]:
        if not (wanted := list(paths)):
            return []
        return [row for each in self._run(statements.SCHEDULES, wanted) if (row := _read(*each))]

    def _now(self) -> datetime:
        [(now,)] = self._run("SELECT clock_timestamp() AT TIME ZONE 'UTC'")
        return _utc(now)

    def _run(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        connection = connections[self.db]
        with connection.cursor() as cursor:
            cursor.execute(
                statement.format(schedule=connection.ops.quote_name(self.model._meta.db_table)), values or None
            )
            rows: list[tuple[Any, ...]] = cursor.fetchall()
        return rows


class ScheduleManager(models.Manager.from_queryset(ScheduleQuerySet)):  # type: ignore[misc]
    """The manager of ``Schedule``."""


def _read(path: str, expression: str, zone: str, is_enabled: bool, next_at: datetime, now: datetime) -> Row | None:
    next_at, now = _utc(next_at), _utc(now)
    try:
        following = Timing(expression, zone).following(next_at, now) if next_at <= now else next_at
    except Exception:
        # Written by another version of the code, with another cronsim.
        logger.exception("The schedule of %s, %r in %r, is left alone: it cannot be read here.", path, expression, zone)
        return None
    return Row(path, is_enabled, next_at, now, following)


def _utc(moment: datetime) -> datetime:
    return moment.replace(tzinfo=timezone.utc)
