"""Enqueueing: calls become rows in the caller's transaction. Admission and wake-ups are done after its commit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from django_pglock.errors import TaskOptionError
from django_pglock.postgres.connections import connection_for, in_transaction, transaction_block
from django_pglock.store.admit import admit_on_commit, admit_own
from django_pglock.store.after import insert_after, lock_awaited
from django_pglock.store.call import Call, Enqueued, due_of, is_alone
from django_pglock.store.insert_tasks import insert_at_key, insert_calls, insert_one
from django_pglock.store.rate import admit_own_at_rate, insert_at_rate
from django_pglock.store.release import release_ended_on_commit
from django_pglock.store.unique import enqueue_unique
from django_pglock.store.wake import after_commit, wake, wake_parents
from django_pglock.tasks.states import TaskStatus

if TYPE_CHECKING:
    from django_pglock.tasks.fields import TaskFields


def enqueue(using: str, task: TaskFields, call: Call, *, meta: str = "{}") -> Enqueued:
    """Add one call of ``task`` in the caller's transaction.

    After the commit, sleeping workers are woken, and a task with a key is admitted. Raises ``DuplicateTask``.
    """
    is_done = False
    if task.after and task.unique is None and (waiting := insert_after(using, task, call, meta)):
        enqueued = waiting
    elif task.after or task.unique is not None:
        return enqueue_many(using, task, [call], meta=meta)[0]
    elif call.lock is None or not _can_admit_at_once(using, task):
        [enqueued] = insert_one(using, task, call, meta)
    else:
        insert = insert_at_key if task.rate is None else insert_at_rate
        enqueued, is_done = insert(using, task, call, meta)
    if not is_done:
        _follow(using, task, [call], [enqueued])
    return enqueued


def enqueue_many(using: str, task: TaskFields, calls: Sequence[Call], *, meta: str = "{}") -> list[Enqueued]:
    """Add calls of ``task``, in order, by one statement.

    Calls of a unique task may need more statements, if they are many or if some of their keys are taken. Pass all such
    calls of a transaction at once. Then the transaction takes their keys in the same order as all other transactions.
    """
    if task.after and task.unique is not None and task.unique.on_conflict == "replace":
        raise TaskOptionError(
            f"{task.module_path} has both after and unique with on_conflict='replace', but a task cannot replace "
            "another one and wait for a third. Leave out after, or use on_conflict='skip' or 'raise'."
        )
    if not task.after:
        return _enqueue_many(using, task, calls, meta)
    with transaction_block(using):
        if missing := lock_awaited(using, task.after):
            raise TaskOptionError(
                f"after of {task.module_path} names a task that does not exist: {', '.join(map(str, missing))}."
            )
        return _enqueue_many(using, task, calls, meta)


def _can_admit_at_once(using: str, task: TaskFields) -> bool:
    """Return whether a call can be written and admitted in one transaction of our own."""
    may_share = task.lock is not None and not is_alone(task)
    needs_more = task.rate is not None and (may_share or due_of(task) != (None, None))
    is_simple = not needs_more and not task.after and task.unique is None
    return is_simple and not in_transaction(connection_for(using))


def _enqueue_many(using: str, task: TaskFields, calls: Sequence[Call], meta: str) -> list[Enqueued]:
    write = insert_calls if task.unique is None else enqueue_unique
    new = write(using, task, calls, meta)
    if new:
        _follow(using, task, calls, new)
    return new


def _follow(using: str, task: TaskFields, calls: Sequence[Call], rows: Sequence[Enqueued]) -> None:
    """After the commit, admit, wake workers, and check whether the tasks of ``after`` have ended."""
    statuses = {row.status for row in rows}
    if task.after:
        release_ended_on_commit(using, task.after)
    elif TaskStatus.BLOCKED in statuses:
        _admit_enqueued(using, task, calls, rows)
    if TaskStatus.READY in statuses:
        wake(using, [task.queue_name])
    if TaskStatus.SCHEDULED in statuses:
        wake_parents(using)


def _admit_enqueued(using: str, task: TaskFields, calls: Sequence[Call], rows: Sequence[Enqueued]) -> None:
    key = calls[0].lock
    if len(rows) == 1 and key is not None and task.rate is None:
        after_commit(using, admit_own, using, rows[0].id, key, is_alone=is_alone(task))
    elif len(rows) == 1 and key is not None and task.rate is not None and (task.lock is None or is_alone(task)):
        has_lock = task.lock is not None
        after_commit(using, admit_own_at_rate, using, rows[0].id, key, task.rate, task.queue_name, is_alone=has_lock)
    else:
        admit_on_commit(using, {call.lock for call in calls})
        if task.rate is not None:
            # Admission may have set the date of the next token. A sleeping worker has to read this date.
            wake_parents(using)
