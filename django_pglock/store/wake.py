"""Wakes sleeping workers after a commit, with as few NOTIFYs as possible.

Each NOTIFY takes a lock that serialises the commits of the whole server. So a NOTIFY is sent only if the row of some
worker has the flag ``is_sleeping``, and the flag is read only after the commit. No wake-up is lost, for these reasons:

- A worker first commits ``is_sleeping``. Then it polls for tasks twice: at once, and again when ``NEGATIVE_TTL`` has
  passed. Only then it waits for a NOTIFY.
- If a task is committed before one of these polls, the poll finds the task. If it is committed later, the process that
  enqueued it reads the flag afterwards, and the flag is set. A process that found no flag less than ``NEGATIVE_TTL``
  ago does not read it again. But then the second poll of the worker is still to come.
- If a process dies between its commit and the NOTIFY, the regular poll finds the task.

One check of the flag after a commit is enough for all tasks that the transaction has added to a queue.

A worker that ends a task of a lock key, and so makes the next one ready, wakes its own fetcher in its process
(``wake_except``). It sends NOTIFY only if another worker sleeps. A worker that stops or may not claim does the same,
so the others claim the task.

If many workers sleep, only the ``WOKEN_FIRST`` oldest workers that serve the same queues poll at once. If one of them
has no capacity for all tasks, it wakes the others (``wake_others``). In any case the others poll a moment later, once
for all notifications that came meanwhile, because a worker woken first may have frozen, or may not know the function.
So a task costs only a few polls, however many workers sleep, and each worker polls in the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any
from uuid import UUID

from django.db import connections, transaction

from django_pglock.postgres.connections import connection_for, has_commit_hooks, in_transaction
from django_pglock.postgres.message import literals, send
from django_pglock.store.statements import filled, rows_of, run

#: The channel for tasks that can be claimed. The payload is the queue's name.
READY_CHANNEL = "django_pglock_ready"
#: The channel for scheduled tasks, so that workers promote them in time. The payload is the queue's name.
SCHEDULED_CHANNEL = "django_pglock_scheduled"
#: The channel for requests to cancel a running task, or for its stack. The payload is the task's id.
REQUEST_CHANNEL = "django_pglock_request"
#: The channel for tasks that the workers woken first have not claimed. The payload is the queue's name.
OTHERS_CHANNEL = "django_pglock_others"
#: The number of sleeping workers that poll at once, the oldest ones. More than one, because one may be frozen.
WOKEN_FIRST = 4
#: Seconds for which this process caches that no worker sleeps. A busy producer reads the flag at most this often.
NEGATIVE_TTL = 0.05

# Wakes sleeping workers, if there are any. It is sent after the commit. If it were sent before, a worker could poll,
# find nothing and fall asleep between our read of its flag and our commit. The commit of this statement need not wait
# for the disk: if the server crashes, the poll finds the task.
WAKE = """
SELECT set_config('synchronous_commit', 'off', true), pg_notify(channel, queue)
FROM (VALUES %s) AS ready (channel, queue)
WHERE EXISTS (SELECT FROM {worker} WHERE is_sleeping)
"""

# Wakes sleeping workers other than the one that sends it.
WAKE_EXCEPT = WAKE.replace("is_sleeping)", "is_sleeping AND id <> %s)")

# Wakes workers at the commit of a transaction that the caller commits itself. No flag can be read after that commit.
NOTIFY = "SELECT pg_notify(%s, queue) FROM unnest(%s::text[]) AS queue"

# Wakes the workers that otherwise poll a moment later, if tasks of these queues are still ready. With EXISTS,
# PostgreSQL may read all ready tasks. With "=" instead of BETWEEN, the planner ignores the order, and need not use the
# index of this order.
WAKE_OTHERS = """
SELECT set_config('synchronous_commit', 'off', true), pg_notify(%s, ready.queue)
FROM unnest(%s::text[]) AS ready (queue)
WHERE (SELECT task.queue FROM {task} AS task
       WHERE task.status = 'READY' AND task.fair_key IS NULL AND task.queue BETWEEN ready.queue AND ready.queue
       ORDER BY task.queue LIMIT 1) IS NOT NULL
   OR (SELECT task.queue FROM {task} AS task
       WHERE task.status = 'READY' AND task.fair_key IS NOT NULL AND task.queue BETWEEN ready.queue AND ready.queue
       ORDER BY task.queue LIMIT 1) IS NOT NULL
"""

# When this process found that no worker sleeps, by the database and the worker that was left out.
_no_worker_slept_at: dict[tuple[str, UUID | None], float] = {}
# The attribute of a Django connection with the channels and queues that the open transaction has to notify. After a
# rollback they stay, and the next commit notifies for them as well, which does no harm.
_PENDING = "_django_pglock_pending_notifications"


def wake(using: str, queues: Iterable[str], channel: str = READY_CHANNEL) -> None:
    """Wake sleeping workers for these queues after the commit of the current transaction."""
    names = set(queues)
    if names and commits_itself(connections[using]):
        run(using, NOTIFY, channel, list(names))
        return
    for queue in names:
        _wake_on_commit(using, channel, queue)


def wake_except(using: str, queues: Iterable[str], worker: UUID) -> None:
    """Wake sleeping workers for these queues, but not ``worker``, whose own fetcher the caller wakes.

    Call it outside of a transaction, after the commit.
    """
    if names := set(queues):
        _notify(using, [(READY_CHANNEL, queue) for queue in sorted(names)], except_worker=worker)


def wake_others(using: str, queues: Iterable[str]) -> bool:
    """Wake all workers now, if tasks of these queues are still ready. Return whether they were woken."""
    return bool(run(using, WAKE_OTHERS, OTHERS_CHANNEL, list(queues)))


def write_sleep_flag(using: str, worker: UUID, *, is_sleeping: bool) -> None:
    """Write into a worker's row whether it sleeps, and has to be woken by NOTIFY."""
    rows_of("Worker", using).filter(pk=worker).update(is_sleeping=is_sleeping)


def _wake_on_commit(using: str, channel: str, queue: str) -> None:
    connection = connections[using]
    if connection.autocommit and _no_worker_sleeps(using):
        # The task is already committed.
        return
    pending: set[tuple[str, str]] = connection.__dict__.setdefault(_PENDING, set())
    pending.add((channel, queue))
    after_commit(using, _wake_once, pending, using)


def _wake_once(pending: set[tuple[str, str]], using: str) -> None:
    if pending:
        # One message for all queues: a bulk retry adds tasks to hundreds of queues, and each message waits for a
        # commit.
        _notify(using, sorted(pending))
        pending.clear()


def _notify(using: str, pending: list[tuple[str, str]], *, except_worker: UUID | None = None) -> None:
    if _no_worker_sleeps(using, except_worker):
        return
    now = time.monotonic()
    connection = connection_for(using)
    connection.ensure_connection()
    values = ", ".join("({}, {})".format(*literals(connection, each)) for each in pending)
    statement = filled(WAKE) % values
    if except_worker is not None:
        statement = filled(WAKE_EXCEPT) % (values, *literals(connection, [str(except_worker)]))
    if send(connection, statement) is None:
        _no_worker_slept_at[using, except_worker] = now


def _no_worker_sleeps(using: str, except_worker: UUID | None = None) -> bool:
    return time.monotonic() - _no_worker_slept_at.get((using, except_worker), -NEGATIVE_TTL) < NEGATIVE_TTL


# Calls a function after a commit. If the function fails, the error is logged and not raised in the caller.
#
# The error cannot undo the commit, and upkeep later does the work that the function could not do.
#
# Django calls no function after a commit that the caller sends itself: with autocommit off, or after a ``BEGIN`` of its
# own. There upkeep does the work. Notifications are part of the transaction, and PostgreSQL delivers them at the
# commit.


def after_commit(using: str, function: Callable[..., Any], *values: Any, **options: Any) -> None:
    """Call a function once the current transaction is committed; without a transaction, now.

    If the caller commits the transaction itself, the function is not called.
    """
    if commits_itself(connections[using]):
        return

    # No functools.partial: Django logs the name of a function that fails, and a partial has no name. The AttributeError
    # would be raised in the caller, and the later functions would not be called.
    def call() -> None:
        function(*values, **options)

    # Django reads only this name. functools.wraps would double the duration of this call.
    call.__qualname__ = function.__qualname__
    transaction.on_commit(call, using=using, robust=True)


def notify_after_commit(using: str, statement: str, *values: Any) -> None:
    """Execute a statement that only sends notifications once the current transaction is committed."""
    if commits_itself(connections[using]):
        run(using, statement, *values)
    else:
        after_commit(using, run, using, statement, *values)


def commits_itself(connection: Any) -> bool:
    """Return whether the caller sends the COMMIT of the current transaction itself."""
    return not has_commit_hooks(connection) and in_transaction(connection)
