"""Makes failed and cancelled tasks READY again at the request of a person."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from django.db import IntegrityError, OperationalError
from django.db.models import Exists, OuterRef, Q
from django.db.models.expressions import RawSQL
from django.db.models.functions import Collate, Length, Now
from psycopg.errors import DeadlockDetected, LockNotAvailable

from django_pglock.postgres.connections import transaction_block
from django_pglock.store.after import wait_again
from django_pglock.store.move_to_status import BETWEEN_REPEATS, DUE_STATUS, REPEATS, movable, move
from django_pglock.store.statements import LIMIT_WAITS, rows_of, run
from django_pglock.store.unique import HAS_UNIQUE_KEY
from django_pglock.store.windows import WINDOW, Progress, by_windows, is_among
from django_pglock.tasks.states import FINISHED, TaskStatus

#: The longest wait for a unique key if one statement takes many. The server searches for deadlocks after a second.
SHORT_WAIT = "10ms"
# Restores the limit that the caller's transaction had before.
RESTORE_WAITS = "SELECT set_config('lock_timeout', %s, true)"

#: How often a retry is repeated because another task with the same unique key was committed meanwhile.
CONFLICT_REPEATS = 10

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


def _retry(tasks: Any) -> int:
    count = _retry_free(tasks)
    for _ in range(REPEATS):
        # The release of a task locks the rows of its waiting tasks for a moment, so this may have to be repeated. It is
        # not repeated if any task was moved: that task may have been cancelled since, because a task of its ``after=``
        # has failed.
        if count or not retriable(tasks).exists():
            break
        time.sleep(BETWEEN_REPEATS)
        count = _retry_free(tasks)
    return count


def _retry_free(tasks: Any) -> int:
    for _ in range(CONFLICT_REPEATS):
        # Another task with the same unique key may be committed between our query and our UPDATE. The next query finds
        # it.
        with suppress(IntegrityError), transaction_block(tasks.db):
            return _retry_once(tasks)
    with transaction_block(tasks.db):
        return _retry_once(tasks)


def _retry_once(tasks: Any) -> int:
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
    chosen = _without_duplicates(tasks)
    unique = chosen.filter(unique_key__isnull=False, status__in=FINISHED).order_by(
        Length("unique_key"), Collate("unique_key", "C")
    )
    ids = list(unique.values_list("pk", flat=True))
    if len(ids) < 2:
        return _move(tasks.db, [chosen], changes)
    # An UPDATE of many rows takes the unique keys in the order of the ids. Another transaction may take the same keys
    # in another order. So this one gives up before the server detects a deadlock, which could end the other one.
    with suppress(_Waited), transaction_block(tasks.db), _short_waits(tasks.db):
        return _move(tasks.db, [chosen], changes)
    # Then the tasks are moved one by one, in the order in which enqueue_many takes the keys.
    rows = rows_of("Task", tasks.db)
    return _move(tasks.db, [tasks.filter(unique_key=None), *(rows.filter(pk=id_) for id_ in ids)], changes)


def _move(using: str, parts: Iterable[Any], changes: dict[str, Any]) -> int:
    moved = [id_ for part in parts for id_, *_ in move(part, TaskStatus.READY, changes, among=FINISHED)]
    wait_again(using, moved)
    return len(moved)


class _Waited(Exception):
    """Another transaction has held a unique key or a row for too long."""


@contextmanager
def _short_waits(using: str) -> Iterator[None]:
    """Limit the wait of each statement of the block for a lock. Raises ``_Waited``."""
    [(before, _)] = run(using, LIMIT_WAITS, SHORT_WAIT)
    try:
        yield
    except OperationalError as error:
        if isinstance(error.__cause__, (LockNotAvailable, DeadlockDetected)):
            raise _Waited from error
        raise
    run(using, RESTORE_WAITS, before)


def _without_duplicates(tasks: Any) -> Any:
    """Return the tasks whose unique key is free. Of several that may be retried with the same key, return the last."""
    others = tasks.model._base_manager.using(tasks.db).filter(unique_key=OuterRef("unique_key"))
    there = others.filter(HAS_UNIQUE_KEY).exclude(pk=OuterRef("pk"))
    # Without the successful tasks, which may be so many that PostgreSQL would not hash them.
    last = tasks.filter(unique_key__isnull=False, status__in=_RETRIABLE)
    last = last.order_by("unique_key", "-pk").distinct("unique_key")
    return tasks.filter(Q(unique_key__isnull=True) | (~Exists(there) & Q(pk__in=last.values("pk"))))
