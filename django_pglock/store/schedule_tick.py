"""Enqueues one task for each schedule that is due.

A tick is one date at which a schedule is due. To take a tick, a worker moves ``next_at`` to the following tick, guarded
by the date that it has read, in the transaction that enqueues the task. If several workers try, one succeeds. The
others find a later date, or a locked row.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from django.db import InterfaceError, OperationalError, transaction

from django_pglock.error_reading import one_line
from django_pglock.loggers import get_logger
from django_pglock.store.marking import first_free, mark
from django_pglock.store.schedule_rows import Row, enqueue_scheduled, known, read_rows
from django_pglock.store.schedule_runs import PREVIOUS_RUN
from django_pglock.store.statements import rows_of, run

if TYPE_CHECKING:
    from django_pglock.tasks.fields import TaskFields

logger = get_logger("django_pglock.tasks")

# If a worker freezes while it takes a tick, another worker must get the tick. And a worker must not wait forever for
# another open transaction. The limits are valid for this transaction only, so they work behind a pooler, too.
LIMIT_TICK = """
SELECT set_config('idle_in_transaction_session_timeout', '10s', true), set_config('lock_timeout', '1s', true)
"""


class Ticks(NamedTuple):
    """The result of one check of the schedules: the ids of the new tasks, and the seconds until the next tick."""

    tasks: list[int]
    next_in: float | None


def enqueue_due(using: str) -> Ticks:
    """Enqueue one task for each known function whose tick has come, however many ticks were missed.

    Each tick is a separate transaction, so that one failure affects no other schedule. Do not call this inside
    ``atomic()``. If a task is refused, for example by ``unique=`` with ``"raise"``, its tick is skipped and logged. A
    tick that failed because of the database is still due at the next check.
    """
    tasks, looked = known(using), time.monotonic()
    rows = read_rows(using, tasks)
    enqueued = [_try_tick(using, tasks[row.path], row) for row in rows if row.is_due]
    # The following tick, also if this tick failed or if another worker is taking it. A new check at once would be a
    # busy loop.
    waits = ((row.following - row.now).total_seconds() for row in rows if row.is_enabled)
    next_in = min(waits, default=None)
    if next_in is not None:
        next_in -= time.monotonic() - looked
    return Ticks([id_ for id_ in enqueued if id_ is not None], next_in)


def _try_tick(using: str, task: TaskFields, row: Row) -> int | None:
    try:
        with transaction.atomic(using=using, durable=True):
            return _take_tick(using, task, row)
    except (OperationalError, InterfaceError) as error:
        text = "The tick of %s at %s was not enqueued. The worker tries again: %s"
        logger.warning(text, row.path, row.next_at, one_line(error))
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
        id_ = enqueue_scheduled(using, task, meta)
    except (OperationalError, InterfaceError):
        raise
    except Exception:
        logger.exception("The tick of %s at %s cannot be enqueued. It is skipped.", row.path, row.next_at)
        return None
    if id_ is not None:
        schedules.filter(pk=row.path).update(last_at=row.next_at, last_task=id_)
    return id_
