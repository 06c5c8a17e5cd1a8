"""Enqueueing: one call, many calls, and calls of which there must not be a second."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from django.db import connections, transaction
from psycopg import ClientCursor

from django_pglock.errors import DuplicateTask, TaskOptionError
from django_pglock.postgres.connections import connection_for
from django_pglock.postgres.message import literals, send
from django_pglock.tasks import statements, wakeup
from django_pglock.tasks.call_keys import NO_KEYS, CallKeys
from django_pglock.tasks.retry import seconds_of
from django_pglock.tasks.states import TaskStatus, UniqueScope
from django_pglock.tasks.waiting import WaitQuerySet

if TYPE_CHECKING:
    from django_pglock.tasks.definition import PostgresTask

#: How often a unique call looks again when the task in its way is gone before it can be named.
TRIES = 100


class Call(NamedTuple):
    """One call as it is written: JSON texts and keys."""

    args: str
    kwargs: str
    keys: CallKeys = NO_KEYS


class Enqueued(NamedTuple):
    """What the server filled in when a task was enqueued; the date is seconds since the epoch.

    ``is_new`` says that it was not there before, as a unique one may have been.
    """

    id: int
    status: str
    enqueued_at: float
    unique_key: str | None = None
    is_new: bool = True


class EnqueueQuerySet(WaitQuerySet):
    """Tasks, and how they come into being."""

    def enqueue(self, task: PostgresTask, call: Call, *, meta: str = "{}") -> Enqueued:
        """Add one call of ``task`` in the caller's transaction.

        Sleeping workers are woken, and a task with a key is admitted, once that transaction is committed. Raises
        ``DuplicateTask``.
        """
        if not task.is_plain:
            return self.enqueue_many(task, [call], meta=meta)[0]
        values: tuple[Any, ...] = (
            task.queue_name,
            task.priority,
            task.module_path,
            call.args,
            call.kwargs,
            task.backend,
            task.max_attempts - 1,
            meta,
        )
        due = _due(task)
        connection = connection_for(self.db)
        connection.ensure_connection()
        if due == (None, None):
            bound = self._sql(statements.ENQUEUE) % literals(connection, values)
        else:
            bound = ClientCursor(connection.connection).mogrify(self._sql(statements.ENQUEUE_LATER), (*values, *due))
        enqueued = Enqueued(*(send(connection, bound) or ()))
        self._follow(task, [call], enqueued.status)
        return enqueued

    def enqueue_many(self, task: PostgresTask, calls: Sequence[Call], *, meta: str = "{}") -> list[Enqueued]:
        """Add calls of ``task``, in order, by one statement unless there are unique ones in the way."""
        if task.after and task.unique is not None and task.unique.on_conflict == "replace":
            raise TaskOptionError(
                f"{task.module_path} has both after and unique with on_conflict='replace', but a task that replaces "
                "another one waits for no task. Leave out after, or use on_conflict='skip' or 'raise'."
            )
        if not task.after:
            return self._enqueue_many(task, calls, meta)
        with transaction.atomic(using=self.db):
            if missing := self.lock_awaited(task.after):
                raise TaskOptionError(
                    f"There is no task {', '.join(map(str, missing))} for {task.module_path} to run after."
                )
            return self._enqueue_many(task, calls, meta)

    def _enqueue_many(self, task: PostgresTask, calls: Sequence[Call], meta: str) -> list[Enqueued]:
        write = self._insert_calls if task.unique is None else self._enqueue_unique
        new = write(task, calls, meta)
        if new:
            self._follow(task, calls, new[0].status)
        return new

    def _insert_calls(self, task: PostgresTask, calls: Sequence[Call], meta: str) -> list[Enqueued]:
        unique, after = task.unique, list(task.after)
        keys = (
            _column((call.keys.lock for call in calls), any_=task.has_keys),
            _column((call.keys.group for call in calls), any_=task.group is not None),
            _column((call.keys.fair for call in calls), any_=task.fair is not None),
            _column((call.keys.unique for call in calls), any_=unique is not None),
        )
        values: tuple[Any, ...] = (
            *(task.queue_name, task.priority, task.module_path, task.backend, task.max_attempts - 1, meta),
            task.concurrency,
            unique and unique.scope.value,
            unique and unique.seconds,
            _seconds_kept(task),
            *_due(task),
            after,
            f"[{','.join([call.args for call in calls])}]",
            f"[{','.join([call.kwargs for call in calls])}]",
            *keys,
            after,
        )
        with connections[self.db].cursor() as cursor:
            cursor.execute(self._sql(statements.ENQUEUE_MANY), values)
            return [Enqueued(*row) for row in cursor.fetchall()]

    def _enqueue_unique(self, task: PostgresTask, calls: Sequence[Call], meta: str) -> list[Enqueued]:
        """Insert what is new and find what is there, again and again until each call has its task."""
        assert task.unique is not None  # noqa: S101 - for the type checker
        on_conflict = task.unique.on_conflict
        found: dict[str, Enqueued] = {}
        left = _without_twins(calls, last=on_conflict == "replace")
        if on_conflict == "raise" and len(left) < len(calls):
            raise DuplicateTask(f"Several of these calls of {task.module_path} have the same unique key.", result_id="")
        for _ in range(TRIES):
            if on_conflict == "replace":
                found.update(_by_key(self._replace(task, left, meta)))
                left = [call for call in left if call.keys.unique not in found]
            found.update(_by_key(self._insert_calls(task, left, meta) if left else []))
            left = [call for call in left if call.keys.unique not in found]
            if not left:
                return [found[str(call.keys.unique)] for call in calls]
            there = self._run(statements.FIND_UNIQUE, [call.keys.unique for call in left])
            if on_conflict == "skip":
                found.update(_by_key(_existing(row) for *row, _scope in there))
                left = [call for call in left if call.keys.unique not in found]
                if not left:
                    return [found[str(call.keys.unique)] for call in calls]
            for id_, *_, scope in there:
                _refuse(task, on_conflict, id_, scope)
            # Who was in the way is gone by now, or had the key for a period that is over.
            self._run(statements.FREE_EXPIRED_UNIQUE, [call.keys.unique for call in left])
        raise DuplicateTask(
            f"A task of {task.module_path} with the same unique key came and went {TRIES} times.", result_id=""
        )

    def _replace(self, task: PostgresTask, calls: Sequence[Call], meta: str) -> list[Enqueued]:
        replaced: list[Enqueued] = []
        with connections[self.db].cursor() as cursor:
            for call in calls:
                keys = call.keys
                values: tuple[Any, ...] = (keys.unique, call.args, call.kwargs, task.queue_name, task.priority)
                values += (task.backend, task.max_attempts - 1, meta, task.concurrency, keys.group, keys.fair)
                values += (_seconds_kept(task), keys.lock, *_due(task))
                cursor.execute(self._sql(statements.REPLACE_UNIQUE), values)
                for *row, key_before in cursor.fetchall():
                    replaced.append(_existing(row))
                    self.admit_on_commit({key_before} - {keys.lock})
        return replaced

    def _follow(self, task: PostgresTask, calls: Iterable[Call], status: str) -> None:
        """Do after the commit what has to be done then: admit, wake, and see whether ``after`` is done already."""
        if task.has_keys:
            self.admit_on_commit({call.keys.lock for call in calls})
        self.release_on_commit(task.after)
        if status == TaskStatus.READY:
            self.wake([task.queue_name], wakeup.READY_CHANNEL)
        elif status == TaskStatus.SCHEDULED:
            self.wake([task.queue_name], wakeup.SCHEDULED_CHANNEL)


def _due(task: PostgresTask) -> tuple[datetime | None, timedelta | None]:
    """Return the date and the delay of a call; one of them is None."""
    due: Any = task.run_after
    if due is None and task.group is not None and task.group.seconds:
        due = timedelta(seconds=task.group.seconds)
    return (None, due) if isinstance(due, timedelta) else (due, None)


def _seconds_kept(task: PostgresTask) -> int | None:
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


def _refuse(task: PostgresTask, on_conflict: str, id_: int, scope: str) -> None:
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
