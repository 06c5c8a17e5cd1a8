"""Enqueueing: calls become rows in the caller's transaction. Admission and wake-ups are done after its commit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from django.db import transaction

from django_pglock.loggers import WORKER, get_logger
from django_pglock.store.admit_one import admit_next, admit_one, can_admit_at_once, enqueue_one
from django_pglock.store.insert_tasks import Call, Enqueued, insert_calls, insert_each, meta_of
from django_pglock.store.release import release_ended_on_commit
from django_pglock.store.statements import array_of_numbers, run
from django_pglock.store.unique import enqueue_unique
from django_pglock.store.wake import after_commit, wake, wake_parents
from django_pglock.tasks import registry
from django_pglock.tasks.states import TaskStatus

if TYPE_CHECKING:
    from django_pglock.tasks.fields import TaskFields

logger = get_logger(WORKER)


def enqueue(using: str, task: TaskFields, call: Call, *, meta: str = "{}") -> Enqueued:
    """Add one call of ``task`` in the caller's transaction.

    After the commit, sleeping workers are woken, and a task with a key is admitted. Raises ``DuplicateTask``.
    """
    if call.lock is None or not can_admit_at_once(using, task):
        return enqueue_many(using, task, [call], meta=meta)[0]
    enqueued, is_done = enqueue_one(using, task, call, meta)
    if enqueued.status != TaskStatus.BLOCKED:
        _wake(using, task, {enqueued.status})
    elif not is_done:
        after_commit(using, admit_next, using, [call.lock], is_rated=task.rate is not None)
    return enqueued


def enqueue_many(using: str, task: TaskFields, calls: Sequence[Call], *, meta: str = "{}") -> list[Enqueued]:
    """Add calls of ``task``, in order, by one statement.

    Calls of a unique task may need more statements, if they are many or if some of their keys are taken. Pass all such
    calls of a transaction at once. Then the transaction takes their keys in the same order as all other transactions.
    """
    write = insert_calls if task.unique is None else enqueue_unique
    rows = write(using, task, calls, meta)
    statuses = {row.status for row in rows}
    if awaited := task.awaited:
        release_ended_on_commit(using, awaited)
    elif TaskStatus.BLOCKED in statuses:
        _admit_on_commit(using, task, calls, rows)
    _wake(using, task, statuses)
    return rows


def enqueue_each(using: str, calls: Sequence[tuple[TaskFields, Call, str]]) -> list[Enqueued]:
    """Add one call, with its ``meta``, of each of several tasks by one statement.

    Not for unique tasks, and not for those that run after others.
    """
    rows = insert_each(using, calls)
    keys, is_rated = set(), False
    for (task, call, _), row in zip(calls, rows, strict=True):
        _wake(using, task, {row.status})
        if row.status == TaskStatus.BLOCKED:
            keys.add(str(call.lock))
            is_rated |= task.rate is not None
    if keys:
        after_commit(using, admit_next, using, keys, is_rated=is_rated)
    return rows


# Enqueues a function that this process does not know, in the queues of the failed tasks. A worker that knows it will
# run it.
ENQUEUE_UNKNOWN = """
INSERT INTO {task} (queue, backend, task_path, args)
SELECT failed.queue, failed.backend, %s, jsonb_build_array(failed.id) FROM {task} AS failed
WHERE failed.id = ANY (%s::bigint[])
"""


def enqueue_handlers(using: str, failed: Iterable[tuple[int, str]]) -> None:
    """Enqueue the functions of ``on_failure=``: pairs of the id of a failed task and the path of its function.

    In the transaction that makes these tasks FAILED. If the database refuses a function, that is logged: otherwise the
    failed task would never end.
    """
    ids: dict[str, list[int]] = {}
    for id_, path in failed:
        ids.setdefault(path, []).append(id_)
    for path, numbers in ids.items():
        _enqueue_handler(using, path, numbers)


def _enqueue_handler(using: str, path: str, ids: list[int]) -> None:
    handler = registry.find(path)
    try:
        with transaction.atomic(using=using):
            if handler is None:
                run(using, ENQUEUE_UNKNOWN, path, array_of_numbers(ids))
            else:
                enqueue_many(using, handler, [Call(f"[{id_}]", "{}") for id_ in ids], meta=meta_of(handler))
    except Exception:
        logger.exception("on_failure of the tasks %s: %s cannot be enqueued.", ids, path)


def _admit_on_commit(using: str, task: TaskFields, calls: Sequence[Call], rows: Sequence[Enqueued]) -> None:
    keys = [call.lock for call in calls if call.lock is not None]
    if len(rows) == len(keys) == 1:
        after_commit(using, admit_one, using, task, rows[0].id, keys[0])
    else:
        after_commit(using, admit_next, using, keys, is_rated=task.rate is not None)


def _wake(using: str, task: TaskFields, statuses: set[str]) -> None:
    if TaskStatus.READY in statuses:
        wake(using, [task.queue_name])
    if TaskStatus.SCHEDULED in statuses:
        wake_parents(using)
