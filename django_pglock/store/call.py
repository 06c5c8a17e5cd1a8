"""One call in the form in which it is written into a row: arguments and keys as texts, and the values of columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from django_pglock.tasks.arguments import to_json
from django_pglock.tasks.options import HEADERS
from django_pglock.tasks.retry import seconds_of

if TYPE_CHECKING:
    from django_pglock.tasks.fields import TaskFields

#: The largest number of calls in one statement, and the number of characters of arguments at which a statement is full.
BATCH, LARGEST_BATCH = 5000, 8_000_000


class Call(NamedTuple):
    """One call in the form in which it is written: JSON texts, and the keys that ``tasks/call_keys.py`` makes of them.

    It is one flat tuple, because the garbage collector visits each tuple of a hundred thousand calls several times.
    """

    args: str
    kwargs: str
    lock: str | None = None
    group: str | None = None
    fair: str | None = None
    unique: str | None = None


class Enqueued(NamedTuple):
    """The values that the server filled in when a task was enqueued; the date is seconds since the epoch.

    ``is_new`` is False if a unique task existed before the call.
    """

    id: int
    status: str
    enqueued_at: float
    unique_key: str | None = None
    is_new: bool = True


def batches(calls: Iterable[Call]) -> Iterator[list[Call]]:
    """Yield the calls in batches, in their order. Each batch is for one statement."""
    batch, size = [], 0
    for call in calls:
        batch.append(call)
        size += len(call.args) + len(call.kwargs)
        if len(batch) == BATCH or size > LARGEST_BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def row_of(task: TaskFields, call: Call, meta: str) -> dict[str, Any]:
    """Return the values of the row of a call, by column. None: the default of the column."""
    return task_columns(task) | call_columns(call, meta)


def task_columns(task: TaskFields) -> dict[str, Any]:
    """Return the columns that are the same for all calls of a task."""
    unique = task.unique
    return {
        "queue": task.queue_name,
        "priority": task.priority,
        "task_path": task.module_path,
        "backend": task.backend,
        "max_retries": task.max_attempts - 1,
        "concurrency": task.concurrency,
        "unique_scope": None if unique is None else unique.scope.value,
        "keep_result": None if task.keep_result is None else int(seconds_of(task.keep_result, option="keep_result")),
    }


def call_columns(call: Call, meta: str) -> dict[str, Any]:
    """Return the other columns of the row of a call."""
    return {
        "args": call.args,
        "kwargs": call.kwargs,
        "meta": meta,
        "lock_key": call.lock,
        "group_key": call.group,
        "fair_key": call.fair,
        "unique_key": call.unique,
    }


def meta_of(task: TaskFields, headers: Mapping[str, Any] | None = None) -> str:
    """Return the JSON of the column ``meta``: the user's, the options that have no column, and headers."""
    meta = dict(task.meta)
    if task.carried:
        meta["options"] = task.carried
    if task.rate:
        meta["rate"] = [task.rate.interval, task.rate.portion]
    if task.redact:
        meta["redact"] = task.redact
    if task.after:
        meta["after"] = task.after
    if headers:
        meta[HEADERS] = headers
    return to_json(meta, what=f"The meta of {task.module_path}") if meta else "{}"


def due_of(task: TaskFields) -> tuple[datetime | None, timedelta | None]:
    """Return the date and the delay of a call; at least one of them is None."""
    due: Any = task.run_after
    if due is None and task.group is not None and task.group.seconds:
        due = timedelta(seconds=task.group.seconds)
    return (None, due) if isinstance(due, timedelta) else (due, None)


def is_alone(task: TaskFields) -> bool:
    """Return whether no other task of its lock key may run at the same time."""
    return (task.concurrency or 1) == 1
