"""Schedules: register them, enqueue the tasks that are due, enable, disable, run now.

A tick is one date at which a schedule is due. To take it, a worker moves ``next_at`` to the following tick, in the
transaction in which it enqueues the task. Of any number of workers only one still finds the date that it has read; the
others find a later date, or a locked row.
"""

from __future__ import annotations

import logging
import time
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, NamedTuple

from django.db import InterfaceError, OperationalError, transaction

from django_pglock.errors import DuplicateTask
from django_pglock.store.marking import first_free, mark
from django_pglock.store.schedule_runs import PREVIOUS_RUN
from django_pglock.store.sql import rows_of, run
from django_pglock.tasks import registry
from django_pglock.tasks.schedules import Timing, timing_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from django_pglock.tasks.fields import TaskFields

logger = logging.getLogger("django_pglock.tasks")

# The server's clock and the dates of the schedules in UTC without a zone. Django hands such dates out unchanged, with
# and without USE_TZ. Functions that this process does not know are left to others.
SCHEDULES = """
SELECT task_path, expression, timezone, is_enabled, next_at AT TIME ZONE 'UTC', clock_timestamp() AT TIME ZONE 'UTC'
FROM {schedule} WHERE task_path = ANY (%s::text[]) ORDER BY next_at, task_path
"""

# Writes schedules that are new or have changed in the code. A row that is up to date would be locked, too, so
# ``register`` leaves it out.
REGISTER_SCHEDULES = """
INSERT INTO {schedule} AS schedule (task_path, expression, timezone, next_at)
SELECT * FROM unnest(%s::text[], %s::text[], %s::text[], %s::timestamptz[]) AS code (task_path) ORDER BY task_path
ON CONFLICT (task_path) DO UPDATE
SET expression = EXCLUDED.expression, timezone = EXCLUDED.timezone, next_at = EXCLUDED.next_at
WHERE (schedule.expression, schedule.timezone) <> (EXCLUDED.expression, EXCLUDED.timezone)
RETURNING task_path
"""

# If a worker freezes while it takes a tick, the others must get the tick; and a worker must not wait forever for
# somebody's open transaction. The limits hold for this transaction only, so they work behind a pooler, too.
LIMIT_TICK = """
SELECT set_config('idle_in_transaction_session_timeout', '10s', true), set_config('lock_timeout', '1s', true)
"""


class Row(NamedTuple):
    """A schedule as it was read, with the time at which it was read. Dates are UTC."""

    path: str
    is_enabled: bool
    next_at: datetime
    now: datetime
    #: The first tick after now. One run makes up for all ticks that were missed.
    following: datetime

    @property
    def is_due(self) -> bool:
        """Its tick has come."""
        return self.is_enabled and self.next_at <= self.now


class Ticks(NamedTuple):
    """What came of one look at the schedules: the ids of the tasks, and the seconds until the next tick, if any."""

    tasks: list[int]
    next_in: float | None


def known(using: str) -> dict[str, TaskFields]:
    """Return the scheduled functions that this process knows and whose tasks live in this database, by path."""
    tasks = registry.scheduled()
    return {task.module_path: task for task in tasks if getattr(task.get_backend(), "database", None) == using}


def timings(using: str) -> dict[str, Timing]:
    """Return the timings of the known functions, as the code says them."""
    return {path: timing_of(task) for path, task in known(using).items()}


def register(using: str) -> list[str]:
    """Write the schedules of the known functions into the table; return the paths that are new or have changed.

    New schedules count from now on, and so do schedules whose expression or zone has changed.
    """
    wanted = timings(using)
    if not wanted:
        return []
    now = _now(using)
    paths = list(wanted)
    written = {path: Timing(*timing) for path, *timing in _written(using, paths)}
    # One statement each: a transaction that waits for a row holds no other one, so it cannot deadlock with a tick, or
    # with a person who removes schedules.
    new = [(path, timing) for path, timing in wanted.items() if written.get(path) != timing]
    return [path for path, timing in new if _register(using, path, timing, timing.following(now, now))]


def _written(using: str, paths: list[str]) -> Any:
    return rows_of("Schedule", using).filter(pk__in=paths).values_list("pk", "expression", "timezone")


def _register(using: str, path: str, timing: Timing, first: datetime) -> bool:
    return bool(run(using, REGISTER_SCHEDULES, [path], [timing.expression], [timing.zone], [first]))


def enqueue_due(using: str) -> Ticks:
    """Enqueue one task for each known function whose tick has come, however many ticks were missed.

    Each is a transaction of its own, so that one failure affects no other schedule; do not call it inside ``atomic()``.
    A tick whose task is refused, as by ``unique=`` with ``"raise"``, is skipped and logged. A tick that failed because
    of the database is still due at the next look.
    """
    tasks, looked = known(using), time.monotonic()
    rows = _rows(using, tasks)
    enqueued = [_try_tick(using, tasks[row.path], row) for row in rows if row.is_due]
    # For a tick that failed, or that another worker is taking, the following one: looking again at once would be a
    # busy loop.
    waits = ((row.following - row.now).total_seconds() for row in rows if row.is_enabled)
    next_in = min(waits, default=None)
    if next_in is not None:
        next_in -= time.monotonic() - looked
    return Ticks([id_ for id_ in enqueued if id_ is not None], next_in)


def enable(schedules: Any) -> int:
    """Enable the disabled ones of these schedules. Returns how many. Ticks that have passed meanwhile are not run."""
    disabled = list(schedules.filter(is_enabled=False).values_list("pk", flat=True))
    return sum(
        schedules.filter(pk=row.path, is_enabled=False, next_at=row.next_at).update(
            is_enabled=True, next_at=row.following
        )
        for row in _rows(schedules.db, disabled)
    )


def disable(schedules: Any) -> int:
    """Enqueue no tasks of these schedules until they are enabled again. Returns how many were enabled."""
    return int(schedules.filter(is_enabled=True).update(is_enabled=False))


def run_now(schedules: Any) -> list[int]:
    """Enqueue the functions of these schedules that this process knows, once each, whatever their dates are.

    The schedules stay as they are. Returns the ids of the tasks, without those that ``unique=`` has refused.
    """
    tasks = known(schedules.db)
    chosen = schedules.filter(pk__in=tasks).order_by("pk").values_list("pk", flat=True)
    enqueued = [_enqueue(schedules.db, tasks[path], {}) for path in chosen]
    return [id_ for id_ in enqueued if id_ is not None]


def _try_tick(using: str, task: TaskFields, row: Row) -> int | None:
    try:
        with transaction.atomic(using=using, durable=True):
            return _take_tick(using, task, row)
    except (OperationalError, InterfaceError) as error:
        text = "The tick of %s at %s was not enqueued. The worker tries again: %s"
        logger.warning(text, row.path, row.next_at, str(error).strip())
        return None


def _take_tick(using: str, task: TaskFields, row: Row) -> int | None:
    run(using, LIMIT_TICK)
    schedules = rows_of("Schedule", using)
    due = schedules.filter(pk=row.path, is_enabled=True, next_at=row.next_at)
    taken = mark(first_free(due, 1), {"next_at": row.following}, "last_task")
    if not taken:
        return None
    [(before,)] = taken
    meta = {"schedule": row.next_at.isoformat()} | ({} if before is None else {PREVIOUS_RUN: before})
    try:
        id_ = _enqueue(using, task, meta)
    except (OperationalError, InterfaceError):
        raise
    except Exception:
        logger.exception("The tick of %s at %s cannot be enqueued. It is skipped.", row.path, row.next_at)
        return None
    if id_ is not None:
        schedules.filter(pk=row.path).update(last_at=row.next_at, last_task=id_)
    return id_


def _enqueue(using: str, task: TaskFields, meta: dict[str, Any]) -> int | None:
    try:
        with transaction.atomic(using=using):
            return int(task.using(meta={**task.meta, **meta}).enqueue().id)
    except DuplicateTask as error:
        logger.info("The schedule of %s enqueued no task: %s", task.module_path, error)
        return None


def _rows(using: str, paths: Iterable[str]) -> list[Row]:
    if not (wanted := list(paths)):
        return []
    return [row for each in run(using, SCHEDULES, wanted) if (row := _read(*each))]


def _now(using: str) -> datetime:
    [(now,)] = run(using, "SELECT clock_timestamp() AT TIME ZONE 'UTC'")
    return _utc(now)


def _read(path: str, expression: str, zone: str, is_enabled: bool, next_at: datetime, now: datetime) -> Row | None:
    next_at, now = _utc(next_at), _utc(now)
    try:
        following = Timing(expression, zone).following(next_at, now) if next_at <= now else next_at
    except Exception:
        # Another version of the code has written it, with another version of cronsim.
        logger.exception(
            "The schedule of %s, %r in %r, cannot be read by this worker and is not changed.", path, expression, zone
        )
        return None
    return Row(path, is_enabled, next_at, now, following)


def _utc(moment: datetime) -> datetime:
    return moment.replace(tzinfo=timezone.utc)
