"""Failed and cancelled tasks become READY again because a person asks for it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from django.db import IntegrityError, OperationalError, transaction
from django.db.models import Exists, OuterRef, Q
from django.db.models.expressions import RawSQL
from django.db.models.functions import Collate, Length, Now
from psycopg.errors import DeadlockDetected, LockNotAvailable

from django_pglock.store.after import wait_again
from django_pglock.store.move_to_status import BETWEEN_TRIES, DUE_STATUS, TRIES, Progress, by_windows, movable, move
from django_pglock.store.statements import rows_of, run
from django_pglock.store.unique import HAS_UNIQUE_KEY
from django_pglock.tasks.states import FINISHED, TaskStatus

#: The longest wait for a unique key when many are taken at once. The server looks for deadlocks after a second.
SHORT_WAIT = "10ms"
LIMIT_WAITS = "SELECT current_setting('lock_timeout'), set_config('lock_timeout', %s, true)"
# The caller's transaction continues with the limit that it had before.
RESTORE_WAITS = "SELECT set_config('lock_timeout', %s, true)"

#: How often a retry tries again when another task with the same unique key was committed meanwhile.
CONFLICT_TRIES = 10


def retry(tasks: Any, *, progress: Progress | None = None) -> int:
    """Make failed and cancelled tasks READY again, with all their retries and snoozes. Returns how many.

    ``TaskQuerySet.retry`` says what becomes of tasks with ``after=`` and ``unique=``.
    """
    return by_windows(tasks, _retriable(tasks).order_by("pk"), _retry, progress)


def _retry(tasks: Any) -> int:
    count = _retry_free(tasks)
    for _ in range(TRIES):
        # When a task ends, the rows of those that wait for it are locked for a moment. Not again if any was moved: it
        # may have been cancelled since, because a task that it waits for has failed.
        if count or not _retriable(tasks).exists():
            break
        time.sleep(BETWEEN_TRIES)
        count = _retry_free(tasks)
    return count


def _retry_free(tasks: Any) -> int:
    for _ in range(CONFLICT_TRIES):
        # Another task with its unique key may be committed between our query and our UPDATE; the next query sees it.
        with suppress(IntegrityError), transaction.atomic(using=tasks.db):
            return _retry_once(tasks)
    with transaction.atomic(using=tasks.db):
        return _retry_once(tasks)


def _retry_once(tasks: Any) -> int:
    changes = {
        "status": DUE_STATUS,
        "waits_for": 0,
        "retries": 0,
        "rescues": 0,
        # Ready since now: the age of the oldest ready task, and its wait, do not count the time before the retry.
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
    # An UPDATE of many rows takes the unique keys in the order of the ids. Two transactions that take the same keys in
    # different orders would deadlock, so this one gives up before the server looks for a deadlock.
    with suppress(_Waited), transaction.atomic(using=tasks.db), _short_waits(tasks.db):
        return _move(tasks.db, [chosen], changes)
    # One after the other, in the order in which enqueue_many takes the keys.
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
    """Let each statement of the block wait for no lock for longer than a moment. Raises ``_Waited``."""
    [(before, _)] = run(using, LIMIT_WAITS, SHORT_WAIT)
    try:
        yield
    except OperationalError as error:
        if isinstance(error.__cause__, (LockNotAvailable, DeadlockDetected)):
            raise _Waited from error
        raise
    run(using, RESTORE_WAITS, before)


def _retriable(tasks: Any) -> Any:
    return _without_duplicates(tasks).filter(status__in=movable(TaskStatus.READY, FINISHED))


def _without_duplicates(tasks: Any) -> Any:
    """Return the tasks without those whose unique key is taken; of several with one key, only the last."""
    others = tasks.model._base_manager.using(tasks.db).filter(unique_key=OuterRef("unique_key"))
    there = others.filter(HAS_UNIQUE_KEY).exclude(pk=OuterRef("pk"))
    last = tasks.filter(unique_key__isnull=False, status__in=FINISHED)
    last = last.order_by("unique_key", "-pk").distinct("unique_key")
    return tasks.filter(Q(unique_key__isnull=True) | (~Exists(there) & Q(pk__in=last.values("pk"))))
