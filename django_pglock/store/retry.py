"""Failed and cancelled tasks become READY again because a person asks for it."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

from django.db import IntegrityError, transaction
from django.db.models import Exists, OuterRef, Q
from django.db.models.expressions import RawSQL
from django.db.models.functions import Collate

from django_pglock.store.after import wait_again
from django_pglock.store.move import BETWEEN_TRIES, TRIES, WAITS, Progress, by_windows, movable, move
from django_pglock.store.sql import rows_of
from django_pglock.store.unique import HAS_UNIQUE_KEY
from django_pglock.tasks.states import FINISHED, TaskStatus

#: How often a retry tries again when another task with the same unique key was committed meanwhile.
LOOKS = 10


def retry(tasks: Any, *, progress: Progress | None = None) -> int:
    """Make failed and cancelled tasks READY again, with all their retries and snoozes. Returns how many.

    ``TaskManager.retry`` says what becomes of tasks with ``after=`` and ``unique=``.
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
    for _ in range(LOOKS):
        # Another task with its unique key may be committed between our query and our UPDATE; the next query sees it.
        with suppress(IntegrityError), transaction.atomic(using=tasks.db):
            return _retry_once(tasks)
    with transaction.atomic(using=tasks.db):
        return _retry_once(tasks)


def _retry_once(tasks: Any) -> int:
    changes = {
        "status": WAITS,
        "waits_for": 0,
        "retries": 0,
        "rescues": 0,
        "run_after": None,
        "worker": None,
        "finished_at": None,
        "cancel_requested_at": None,
        "meta": RawSQL("CASE WHEN meta ? 'snoozes' THEN meta - 'snoozes' ELSE meta END", ()),
        "progress": None,
        "expires_at": None,
    }
    chosen = _without_duplicates(tasks)
    parts = [chosen]
    # Unique tasks one after the other, in the order in which enqueue_many takes their keys: two transactions that take
    # the same keys in different orders would deadlock. An UPDATE of many rows takes them in the order of their ids.
    unique = chosen.filter(unique_key__isnull=False, status__in=FINISHED).order_by(Collate("unique_key", "C"))
    ids = list(unique.values_list("pk", flat=True))
    if len(ids) > 1:
        rows = rows_of("Task", tasks.db)
        parts = [tasks.filter(unique_key=None), *(rows.filter(pk=id_) for id_ in ids)]
    moved = [id_ for part in parts for id_, *_ in move(part, TaskStatus.READY, changes, among=FINISHED)]
    wait_again(tasks.db, moved)
    return len(moved)


def _retriable(tasks: Any) -> Any:
    return _without_duplicates(tasks).filter(status__in=movable(TaskStatus.READY, FINISHED))


def _without_duplicates(tasks: Any) -> Any:
    """Return the tasks without those whose unique key is taken; of several with one key, only the last."""
    others = tasks.model._base_manager.using(tasks.db).filter(unique_key=OuterRef("unique_key"))
    there = others.filter(HAS_UNIQUE_KEY).exclude(pk=OuterRef("pk"))
    last = tasks.filter(unique_key__isnull=False, status__in=FINISHED)
    last = last.order_by("unique_key", "-pk").distinct("unique_key")
    return tasks.filter(Q(unique_key__isnull=True) | (~Exists(there) & Q(pk__in=last.values("pk"))))
