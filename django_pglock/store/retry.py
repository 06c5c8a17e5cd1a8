"""Makes failed and cancelled tasks READY again at the request of a person.

One guarded UPDATE moves all of them. If a row or a unique key is being taken at this moment, those that are free are
moved, and the others are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from django.db import IntegrityError, OperationalError
from django.db.models import Exists, OuterRef, Q
from django.db.models.expressions import RawSQL
from django.db.models.functions import Collate, Length, Now
from psycopg.errors import DeadlockDetected, LockNotAvailable, UniqueViolation

from django_pglock.postgres.connections import transaction_block
from django_pglock.store.after import wait_again
from django_pglock.store.move_to_status import DUE_STATUS, movable, move
from django_pglock.store.statements import LIMIT_WAITS, rows_of, run
from django_pglock.store.unique import HAS_UNIQUE_KEY
from django_pglock.store.windows import WINDOW, Progress, by_windows, is_among
from django_pglock.tasks.states import FINISHED, TaskStatus

#: The longest wait for a row or a unique key, while all tasks are moved at once, and while they are moved one by one.
#: The release of a task locks the rows of its waiting tasks for a moment. The server searches for deadlocks after a
#: second, and this one may wait for another transaction that waits for this one.
WAIT, SHORT_WAIT = "100ms", "1ms"
# Restores the limit that the caller's transaction had before.
RESTORE_WAITS = "SELECT set_config('lock_timeout', %s, true)"

_RETRIABLE = movable(TaskStatus.READY, FINISHED)


def retry(tasks: Any, *, progress: Progress | None = None) -> int:
    """Make failed and cancelled tasks READY again, with all their retries and snoozes. Returns how many.

    ``TaskQuerySet.retry`` describes tasks with ``after=`` and ``unique=``.
    """
    return by_windows(tasks, retriable(tasks).order_by("pk"), _retry, progress)


def retriable(tasks: Any) -> Any:
    """Return the tasks that ``retry`` would move now."""
    return _without_duplicates(tasks).filter(status__in=_RETRIABLE)


def left_cancelled(tasks: Any) -> list[int]:
    """Return tasks that stay cancelled although ``retry`` of these tasks repairs what they were to run after.

    The first of them, among the next few thousand cancelled tasks: no index has the tasks of ``after=``. Tasks that run
    after one of them stay cancelled, too.
    """
    ids = list(retriable(tasks).order_by("pk").values_list("pk", flat=True)[:WINDOW])
    if not ids:
        return []
    rows = rows_of("Task", tasks.db).filter(status=TaskStatus.CANCELLED, pk__gt=ids[0])
    repaired, left = set(ids), list[int]()
    for id_, after in rows.order_by("pk").values_list("pk", "meta__after")[:WINDOW]:
        if id_ not in repaired and isinstance(after, list) and not repaired.isdisjoint(after):
            repaired.add(id_)
            left.append(id_)
    # Those behind the first few thousand are retried, too.
    retried = set(retriable(tasks).filter(is_among(left)).values_list("pk", flat=True)) if left else ()
    return [id_ for id_ in left if id_ not in retried]


def has_taken_key(tasks: Any) -> Any:
    """Return the failed and cancelled tasks that ``retry`` leaves out because another task has their unique key."""
    others = tasks.filter(status__in=_RETRIABLE, unique_key__isnull=False)
    return others.exclude(pk__in=retriable(others).order_by().values("pk"))


def _retry(tasks: Any) -> int:
    with transaction_block(tasks.db):
        with _limited_waits(tasks.db):
            try:
                moved = _move(_without_duplicates(tasks), skip_locked=False)
            except _Taken:
                moved = _move_free(tasks)
        wait_again(tasks.db, moved)
    return len(moved)


def _move_free(tasks: Any) -> list[int]:
    """Move the tasks whose rows and unique keys are free: those with a key one by one."""
    run(tasks.db, LIMIT_WAITS, SHORT_WAIT)
    moved = _move(tasks.filter(unique_key=None))
    # In the order in which enqueue_many takes the keys.
    unique = _without_duplicates(tasks).filter(unique_key__isnull=False, status__in=_RETRIABLE)
    for row in unique.order_by(Length("unique_key"), Collate("unique_key", "C")).values_list("pk"):
        with suppress(_Taken):
            moved += _move(rows_of("Task", tasks.db).filter(pk__in=row))
    return moved


def _move(tasks: Any, *, skip_locked: bool = True) -> list[int]:
    """Move these tasks, and return their ids. Raises ``_Taken``; then none was moved."""
    changes = {
        "status": DUE_STATUS,
        "waits_for": 0,
        "retries": 0,
        "rescues": 0,
        # Now, so that the age of the oldest ready task and the wait of this task do not include the time before.
        "run_after": Now(),
        "worker": None,
        "finished_at": None,
        "cancel_requested_at": None,
        "meta": RawSQL("CASE WHEN meta ? 'snoozes' THEN meta - 'snoozes' ELSE meta END", ()),
        "progress": None,
        "fingerprint": None,
        "expires_at": None,
    }
    try:
        with transaction_block(tasks.db):
            moved = move(tasks, TaskStatus.READY, changes, among=FINISHED, skip_locked=skip_locked)
    except (IntegrityError, OperationalError) as error:
        if isinstance(error.__cause__, (UniqueViolation, LockNotAvailable, DeadlockDetected)):
            raise _Taken from error
        raise
    return [id_ for id_, *_ in moved]


class _Taken(Exception):
    """Another transaction has a unique key or a row."""


@contextmanager
def _limited_waits(using: str) -> Iterator[None]:
    """Limit the wait of each statement of the block for a lock."""
    [(before, _)] = run(using, LIMIT_WAITS, WAIT)
    yield
    run(using, RESTORE_WAITS, before)


def _without_duplicates(tasks: Any) -> Any:
    """Return the tasks whose unique key is free. Of several that may be retried with the same key, return the last."""
    others = tasks.model._base_manager.using(tasks.db).filter(unique_key=OuterRef("unique_key"))
    there = others.filter(HAS_UNIQUE_KEY).exclude(pk=OuterRef("pk"))
    # Without the successful tasks, which may be so many that PostgreSQL would not hash them.
    last = tasks.filter(unique_key__isnull=False, status__in=_RETRIABLE)
    last = last.order_by("unique_key", "-pk").distinct("unique_key")
    return tasks.filter(Q(unique_key__isnull=True) | (~Exists(there) & Q(pk__in=last.values("pk"))))
