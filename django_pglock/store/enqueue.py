"""Enqueueing: one call, many calls, and calls of which there must not be a second."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from django.db import connections, transaction
from psycopg import ClientCursor

from django_pglock.errors import DuplicateTask, TaskOptionError
from django_pglock.postgres.connections import connection_for, in_transaction
from django_pglock.postgres.message import literals, send
from django_pglock.store import statements
from django_pglock.store.admit import ADMITTED, admit_on_commit, admit_own
from django_pglock.store.after import lock_awaited
from django_pglock.store.release import release_on_commit
from django_pglock.store.sql import filled, message, run
from django_pglock.store.wake import READY_CHANNEL, SCHEDULED_CHANNEL, wake
from django_pglock.tasks.call_keys import NO_KEYS, CallKeys
from django_pglock.tasks.retry import seconds_of
from django_pglock.tasks.states import TaskStatus, UniqueScope

if TYPE_CHECKING:
    from django_pglock.tasks.fields import TaskFields

#: How often a unique call looks again when the task in its way is gone before it can be named.
TRIES = 100


class Call(NamedTuple):
    """One call as it is written: JSON texts and keys."""

    args: str
    kwargs: str
    keys: CallKeys = NO_KEYS
    #: Drawn before it is written, where that is not done in the order of the calls.
    id: int | None = None


#: Calls that one statement writes, and characters of their arguments after which it is full.
BATCH, LARGEST_BATCH = 5000, 8_000_000


def batches(calls: Iterable[Call]) -> Iterator[list[Call]]:
    """Yield calls in portions for one statement each, as they come."""
    batch, size = [], 0
    for call in calls:
        batch.append(call)
        size += len(call.args) + len(call.kwargs)
        if len(batch) == BATCH or size > LARGEST_BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class Enqueued(NamedTuple):
    """What the server filled in when a task was enqueued; the date is seconds since the epoch.

    ``is_new`` says that it was not there before, as a unique one may have been.
    """

    id: int
    status: str
    enqueued_at: float
    unique_key: str | None = None
    is_new: bool = True


def enqueue(using: str, task: TaskFields, call: Call, *, meta: str = "{}") -> Enqueued:
    """Add one call of ``task`` in the caller's transaction.

    Sleeping workers are woken, and a task with a key is admitted, once that transaction is committed. Raises
    ``DuplicateTask``.
    """
    if task.is_plain and _due(task) == (None, None):
        enqueued = _insert_plain(using, task, call, meta)
    elif call.keys.lock is None or not _can_admit_at_once(using, task):
        return enqueue_many(using, task, [call], meta=meta)[0]
    else:
        enqueued, other = _insert_at_key(using, task, call, meta)
        if enqueued.status == TaskStatus.BLOCKED and _is_alone(task) and other in ADMITTED:
            return enqueued
    _follow(using, task, [call], [enqueued])
    return enqueued


def _can_admit_at_once(using: str, task: TaskFields) -> bool:
    """Say whether a call can be written and admitted to its key in one transaction, which is not the caller's."""
    is_simple = not task.after and task.unique is None and task.rate is None
    return is_simple and not in_transaction(connection_for(using))


def enqueue_many(using: str, task: TaskFields, calls: Sequence[Call], *, meta: str = "{}") -> list[Enqueued]:
    """Add calls of ``task``, in order, by one statement.

    Those of a unique task by more, if there are many or some in the way: give all of a transaction's at once.
    """
    if task.after and task.unique is not None and task.unique.on_conflict == "replace":
        raise TaskOptionError(
            f"{task.module_path} has both after and unique with on_conflict='replace', but a task that replaces "
            "another one waits for no task. Leave out after, or use on_conflict='skip' or 'raise'."
        )
    if not task.after:
        return _enqueue_many(using, task, calls, meta)
    with transaction.atomic(using=using):
        if missing := lock_awaited(using, task.after):
            raise TaskOptionError(
                f"There is no task {', '.join(map(str, missing))} for {task.module_path} to run after."
            )
        return _enqueue_many(using, task, calls, meta)


def _enqueue_many(using: str, task: TaskFields, calls: Sequence[Call], meta: str) -> list[Enqueued]:
    write = _insert_calls if task.unique is None else _enqueue_unique
    new = write(using, task, calls, meta)
    if new:
        _follow(using, task, calls, new)
    return new


def _insert_plain(using: str, task: TaskFields, call: Call, meta: str) -> Enqueued:
    connection = connection_for(using)
    connection.ensure_connection()
    bound = filled(statements.ENQUEUE) % literals(connection, _row(task, call, meta))
    return Enqueued(*(send(connection, bound) or ()))


def _insert_at_key(using: str, task: TaskFields, call: Call, meta: str) -> tuple[Enqueued, str | None]:
    connection = connection_for(using)
    connection.ensure_connection()
    key = call.keys.lock
    values = (key, key, *_one(task, call, meta))
    lock_and_insert = message(using, (statements.LOCK_KEYS, [[key]]), (statements.ENQUEUE_AT_KEY, values))
    *row, other = send(connection, lock_and_insert) or ()
    return Enqueued(*row), other


def _insert_calls(using: str, task: TaskFields, calls: Sequence[Call], meta: str) -> list[Enqueued]:
    if len(calls) == 1 and not task.after and calls[0].id is None:
        return _insert_one(using, task, calls[0], meta)
    return _insert_many(using, task, calls, meta)


def _insert_one(using: str, task: TaskFields, call: Call, meta: str) -> list[Enqueued]:
    connection = connection_for(using)
    connection.ensure_connection()
    bind = ClientCursor(connection.connection).mogrify
    row = send(connection, bind(filled(statements.ENQUEUE_ONE), _one(task, call, meta)))
    return [Enqueued(*row)] if row else []


def _insert_many(using: str, task: TaskFields, calls: Sequence[Call], meta: str) -> list[Enqueued]:
    unique, after = task.unique, list(task.after)
    keys = (
        _column((call.keys.lock for call in calls), any_=task.has_keys),
        _column((call.keys.group for call in calls), any_=task.group is not None),
        _column((call.keys.fair for call in calls), any_=task.fair is not None),
        _column((call.keys.unique for call in calls), any_=unique is not None),
    )
    values: tuple[Any, ...] = (
        *(task.queue_name, task.priority, task.module_path, task.backend, task.max_attempts - 1, meta),
        *_options(task),
        *_due(task),
        after,
        *(() if calls[0].id is None else ([call.id for call in calls],)),
        f"[{','.join([call.args for call in calls])}]",
        f"[{','.join([call.kwargs for call in calls])}]",
        *keys,
        after,
    )
    statement = statements.ENQUEUE_MANY if calls[0].id is None else statements.ENQUEUE_DRAWN
    return [Enqueued(*row) for row in run(using, statement, *values)]


def _enqueue_unique(using: str, task: TaskFields, calls: Sequence[Call], meta: str) -> list[Enqueued]:
    """Insert what is new and find what is there, again and again until each call has its task."""
    assert task.unique is not None  # noqa: S101 - for the type checker
    on_conflict = task.unique.on_conflict
    found: dict[str, Enqueued] = {}
    left = _in_order_of_keys(using, _without_twins(calls, last=on_conflict == "replace"))
    if on_conflict == "raise" and len(left) < len(calls):
        raise DuplicateTask(f"Several of these calls of {task.module_path} have the same unique key.", result_id="")
    for _ in range(TRIES):
        if on_conflict == "replace":
            found.update(_by_key(_replace(using, task, left, meta)))
            left = [call for call in left if call.keys.unique not in found]
        for batch in batches(left):
            found.update(_by_key(_insert_calls(using, task, batch, meta)))
        left = [call for call in left if call.keys.unique not in found]
        if not left:
            return [found[str(call.keys.unique)] for call in calls]
        there = run(using, statements.FIND_UNIQUE, [call.keys.unique for call in left])
        if on_conflict == "skip":
            found.update(_by_key(_existing(row) for *row, _scope in there))
            left = [call for call in left if call.keys.unique not in found]
            if not left:
                return [found[str(call.keys.unique)] for call in calls]
        for id_, *_, scope in there:
            _refuse(task, on_conflict, id_, scope)
        # Who was in the way is gone by now, or had the key for a period that is over.
        run(using, statements.FREE_EXPIRED_UNIQUE, [call.keys.unique for call in left])
    raise DuplicateTask(
        f"A task of {task.module_path} with the same unique key came and went {TRIES} times.", result_id=""
    )


def _in_order_of_keys(using: str, calls: list[Call]) -> list[Call]:
    """Return unique calls in the order in which everybody takes their keys: in another, two would deadlock."""
    if len(calls) == 1:
        return calls
    ids = sorted(id_ for (id_,) in run(using, statements.DRAW_IDS, len(calls)))
    calls = [call._replace(id=id_) for call, id_ in zip(calls, ids, strict=True)]
    return sorted(calls, key=lambda call: str(call.keys.unique))


def _replace(using: str, task: TaskFields, calls: Sequence[Call], meta: str) -> list[Enqueued]:
    replaced: list[Enqueued] = []
    with connections[using].cursor() as cursor:
        for call in calls:
            keys = call.keys
            values: tuple[Any, ...] = (keys.unique, call.args, call.kwargs, task.queue_name, task.priority)
            values += (task.backend, task.max_attempts - 1, meta, task.concurrency, keys.group, keys.fair)
            values += (_seconds_kept(task), keys.lock, *_due(task))
            cursor.execute(filled(statements.REPLACE_UNIQUE), values)
            for *row, key_before in cursor.fetchall():
                replaced.append(_existing(row))
                admit_on_commit(using, {key_before} - {keys.lock})
    return replaced


def _follow(using: str, task: TaskFields, calls: Sequence[Call], rows: Sequence[Enqueued]) -> None:
    """Do after the commit what has to be done then: admit, wake, and see whether ``after`` is done already."""
    statuses = {row.status for row in rows}
    if TaskStatus.BLOCKED in statuses:
        _admit_enqueued(using, task, calls, rows)
    release_on_commit(using, task.after)
    if TaskStatus.READY in statuses:
        wake(using, [task.queue_name], READY_CHANNEL)
    if TaskStatus.SCHEDULED in statuses:
        wake(using, [task.queue_name], SCHEDULED_CHANNEL)


def _admit_enqueued(using: str, task: TaskFields, calls: Sequence[Call], rows: Sequence[Enqueued]) -> None:
    key = calls[0].keys.lock
    if len(rows) > 1 or key is None or task.rate is not None:
        admit_on_commit(using, {call.keys.lock for call in calls})
    else:
        admit = partial(admit_own, using, rows[0].id, key, is_alone=_is_alone(task))
        transaction.on_commit(admit, using=using, robust=True)


def _row(task: TaskFields, call: Call, meta: str) -> tuple[str | int, ...]:
    """Return what every row of a call has."""
    return (
        *(task.queue_name, task.priority, task.module_path, call.args, call.kwargs),
        *(task.backend, task.max_attempts - 1, meta),
    )


def _options(task: TaskFields) -> tuple[Any, ...]:
    """Return the options that have columns of their own, and that only some tasks have."""
    unique = task.unique
    return task.concurrency, unique and unique.scope.value, unique and unique.seconds, _seconds_kept(task)


def _one(task: TaskFields, call: Call, meta: str) -> tuple[Any, ...]:
    """Return the values of ``ENQUEUE_ONE``."""
    keys = call.keys
    return *_row(task, call, meta), keys.group, keys.fair, keys.unique, *_options(task), *_due(task), keys.lock


def _is_alone(task: TaskFields) -> bool:
    """Say whether no other task of its lock key may run beside it."""
    return (task.concurrency or 1) == 1


def _due(task: TaskFields) -> tuple[datetime | None, timedelta | None]:
    """Return the date and the delay of a call; one of them is None."""
    due: Any = task.run_after
    if due is None and task.group is not None and task.group.seconds:
        due = timedelta(seconds=task.group.seconds)
    return (None, due) if isinstance(due, timedelta) else (due, None)


def _seconds_kept(task: TaskFields) -> int | None:
    return None if task.keep_result is None else int(seconds_of(task.keep_result, option="keep_result"))


def _column(values: Iterable[str | None], *, any_: bool) -> list[str | None] | None:
    # unnest() pads what is missing with NULL.
    return list(values) if any_ else None


def _without_twins(calls: Sequence[Call], *, last: bool) -> list[Call]:
    """Return the first, or the last, call of each unique key."""
    by_key: dict[str | None, Call] = {}
    for call in calls:
        by_key[call.keys.unique] = call if last else by_key.get(call.keys.unique, call)
    return list(by_key.values())


def _refuse(task: TaskFields, on_conflict: str, id_: int, scope: str) -> None:
    """Raise ``DuplicateTask`` when this task keeps a call from being enqueued."""
    what = f"Task {id_} of {task.module_path} has the same unique key"
    if on_conflict == "raise":
        raise DuplicateTask(f"{what}.", result_id=str(id_))
    if on_conflict == "replace" and scope != UniqueScope.WAITING:
        raise DuplicateTask(f"{what} for longer than it waits, so it cannot be replaced.", result_id=str(id_))


def _existing(row: Iterable[Any]) -> Enqueued:
    return Enqueued(*row)._replace(is_new=False)


def _by_key(rows: Iterable[Enqueued]) -> dict[str, Enqueued]:
    return {str(row.unique_key): row for row in rows}
