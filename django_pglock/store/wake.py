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

A notification has an address: the channel of the parent of a sleeping worker that serves the queue. A few workers are
woken, by chance, because one may have frozen or may not know the function. A worker that cannot claim all that is ready
wakes others (``wake_others``). So a task costs only a few polls, however many workers sleep.

A worker that ends a task of a lock key, and so makes the next one ready, wakes its own feeder in its process
(``except_worker``). It sends NOTIFY only if another worker sleeps. A worker that stops or may not claim does the same,
so the others claim the task.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any
from uuid import UUID

from django.db import connections, transaction

from django_pglock.conf import get_settings
from django_pglock.postgres.connections import connection_for, has_commit_hooks, in_transaction
from django_pglock.postgres.message import literals, send
from django_pglock.store.statements import array_of_texts, filled, rows_of, run
from django_pglock.tasks.queues import OWN_QUEUE

#: The channel for scheduled tasks, so that parents promote them in time.
SCHEDULED_CHANNEL = "django_pglock_scheduled"
#: The number of workers that are woken for a queue. More than one, because one may be frozen.
WOKEN = 2
#: How often a wake-up is passed on by workers that could claim nothing, perhaps because they do not know the function.
MOST_HOPS = 2
#: Seconds for which this process caches that no worker sleeps. A busy producer reads the flag at most this often. And
#: the number of queues for which it is cached.
NEGATIVE_TTL, MOST_REMEMBERED = 0.05, 1000

# Whether a worker serves a queue: as ``worker.queues.Queues`` and ``is_served()`` read the queues of its row.
_SERVES = f"""(worker.queues = '[]' OR ready.queue = '{OWN_QUEUE}' OR (
    SELECT COALESCE(bool_or(hits) FILTER (WHERE NOT is_excluded), true)
           AND NOT COALESCE(bool_or(hits) FILTER (WHERE is_excluded), false)
    FROM (SELECT is_excluded, CASE WHEN right(pattern, 1) = '*' THEN starts_with(ready.queue, left(pattern, -1))
                                   ELSE ready.queue = pattern END AS hits
          FROM (SELECT given LIKE '--exclude %%' AS is_excluded,
                       CASE WHEN given LIKE '--exclude %%' THEN substr(given, 11)
                            ELSE regexp_replace(given, '=[0-9]+$', '') END AS pattern
                FROM jsonb_array_elements_text(worker.queues) AS given) AS patterns) AS compared))"""

# Wakes some sleeping workers for queues, if there are any. It is sent after the commit. If it were sent before, a
# worker could poll, find nothing and fall asleep between our read of its flag and our commit. The commit of this
# statement need not wait for the disk: if the server crashes, the poll finds the task.
_WAKE = f"""
SELECT {{{{settings}}}}
       pg_notify('pglock_' || replace(target.parent::text, '-', ''), target.id || ' %s ' || ready.queue)
FROM unnest(%s::text[]) AS ready (queue) CROSS JOIN LATERAL (
    SELECT worker.id, worker.parent FROM {{worker}} AS worker
    WHERE NOT worker.is_stopping AND {_SERVES}{{{{condition}}}}
      AND worker.heartbeat_at > clock_timestamp() - make_interval(secs => %s)
    ORDER BY {{{{order}}}}random() LIMIT {WOKEN}) AS target
"""
_AFTER_COMMIT = _WAKE.replace("{{settings}}", "set_config('synchronous_commit', 'off', true),").replace("{{order}}", "")
WAKE = _AFTER_COMMIT.replace("{{condition}}", " AND worker.is_sleeping")
# Wakes sleeping workers other than the one that sends it.
WAKE_EXCEPT = _AFTER_COMMIT.replace("{{condition}}", " AND worker.is_sleeping AND worker.id <> %s")
# Wakes workers at the commit of a transaction that the caller commits itself. No flag can be read after that commit, so
# workers that do not sleep yet are woken, too. The commit is the caller's, and its settings stay.
NOTIFY = (
    _WAKE.replace("{{settings}}", "").replace("{{condition}}", "").replace("{{order}}", "worker.is_sleeping DESC, ")
)

# Has the parents look when the next scheduled task is due. Without a sleeping worker, upkeep looks soon enough.
NOTIFY_PARENTS = f"SELECT pg_notify('{SCHEDULED_CHANNEL}', '') WHERE EXISTS (SELECT FROM {{worker}} WHERE is_sleeping)"
# The same for blocked tasks, after a COMMIT of the caller's own, after which no code of ours admits them.
BLOCKED = "blocked"
NOTIFY_BLOCKED = NOTIFY_PARENTS.replace("''", f"'{BLOCKED}'")
#: Stands for all parents among the names of queues. No queue has an empty name.
PARENTS = ""

# Of these queues, those that have ready tasks. With EXISTS, PostgreSQL may read all ready tasks. With "=" instead of
# BETWEEN, the planner ignores the order, and need not use the index of this order.
STILL_READY = """
SELECT ready.queue FROM unnest(%s::text[]) AS ready (queue)
WHERE (SELECT task.queue FROM {task} AS task
       WHERE task.status = 'READY' AND task.fair_key IS NULL AND task.queue BETWEEN ready.queue AND ready.queue
       ORDER BY task.queue LIMIT 1) IS NOT NULL
   OR (SELECT task.queue FROM {task} AS task
       WHERE task.status = 'READY' AND task.fair_key IS NOT NULL AND task.queue BETWEEN ready.queue AND ready.queue
       ORDER BY task.queue LIMIT 1) IS NOT NULL
"""

# When this process found that no worker sleeps: by the database, the queue, and the worker that was left out.
_no_worker_slept_at: dict[tuple[str, str, UUID | None], float] = {}
# The attribute of a Django connection with the queues for which the open transaction has to notify. After a
# rollback they stay, and the next commit notifies for them as well, which does no harm.
_PENDING = "_django_pglock_pending_notifications"


def channel_of(parent: UUID) -> str:
    """Return the channel of the notifications for the workers of one parent.

    A payload has a worker's id. If tasks are ready, the number of hops and the queue follow. Without them, there is a
    request to the worker about one of its running tasks.
    """
    return f"pglock_{parent.hex}"


def wake(using: str, queues: Iterable[str]) -> None:
    """Wake sleeping workers for these queues after the commit of the current transaction."""
    names = set(queues)
    if names and commits_itself(connections[using]):
        if not _will_be_prepared(connections[using]):
            run(using, NOTIFY, 0, list(names), get_settings().HEARTBEAT_LIMIT)
        return
    for queue in names:
        _wake_on_commit(using, queue)


def wake_except(using: str, queues: Iterable[str], worker: UUID, *, hops: int = 0) -> None:
    """Wake sleeping workers for these queues, but not ``worker``, whose own feeder the caller wakes.

    Call it outside of a transaction, after the commit.
    """
    if names := sorted(set(queues)):
        _notify(using, names, except_worker=worker, hops=hops)


def wake_others(using: str, queues: Iterable[str], worker: UUID, *, hops: int = 0) -> None:
    """Wake workers other than ``worker`` now, if tasks of these queues are still ready."""
    if names := [queue for queue in queues if not _no_worker_sleeps(using, queue, worker)]:
        wake_except(using, [queue for (queue,) in run(using, STILL_READY, names)], worker, hops=hops)


def wake_parents(using: str) -> None:
    """Have parents look, after the commit of the current transaction, when the next scheduled task is due."""
    if commits_itself(connections[using]):
        if not _will_be_prepared(connections[using]):
            run(using, NOTIFY_PARENTS)
    else:
        _wake_on_commit(using, PARENTS)


def write_sleep_flag(using: str, worker: UUID, *, is_sleeping: bool) -> None:
    """Write into a worker's row whether it sleeps, and has to be woken by NOTIFY."""
    rows_of("Worker", using).filter(pk=worker).update(is_sleeping=is_sleeping)


def _wake_on_commit(using: str, queue: str) -> None:
    connection = connections[using]
    if connection.autocommit and _no_worker_sleeps(using, queue):
        # The task is already committed.
        return
    pending: set[str] = connection.__dict__.setdefault(_PENDING, set())
    pending.add(queue)
    after_commit(using, _wake_once, pending, using)


def _wake_once(pending: set[str], using: str) -> None:
    if pending:
        # One message for all queues: a bulk retry adds tasks to hundreds of queues, and each message waits for a
        # commit.
        _notify(using, sorted(pending))
        pending.clear()


def _notify(using: str, queues: list[str], *, except_worker: UUID | None = None, hops: int = 0) -> None:
    queues = [queue for queue in queues if not _no_worker_sleeps(using, queue, except_worker)]
    if not queues:
        return
    now = time.monotonic()
    connection = connection_for(using)
    connection.ensure_connection()
    excepted = () if except_worker is None else (str(except_worker),)
    texts = [filled(NOTIFY_PARENTS)] if PARENTS in queues else []
    if names := [queue for queue in queues if queue != PARENTS]:
        values = literals(connection, (array_of_texts(names), *excepted))
        texts.append(filled(WAKE_EXCEPT if excepted else WAKE) % (hops, *values, get_settings().HEARTBEAT_LIMIT))
    if [send(connection, text) for text in texts] == [None] * len(texts):
        if len(_no_worker_slept_at) > MOST_REMEMBERED:
            _no_worker_slept_at.clear()
        _no_worker_slept_at.update(dict.fromkeys(((using, queue, except_worker) for queue in queues), now))


def _no_worker_sleeps(using: str, queue: str, except_worker: UUID | None = None) -> bool:
    slept_at = _no_worker_slept_at.get((using, queue, except_worker), -NEGATIVE_TTL)
    return time.monotonic() - slept_at < NEGATIVE_TTL


# Calls a function after a commit. If the function fails, the error is logged and not raised in the caller.
#
# The error cannot undo the commit, and upkeep later does the work that the function could not do.
#
# Django calls no function after a commit that the caller sends itself: with autocommit off, or after a ``BEGIN`` of its
# own. There upkeep does the work. Notifications are part of the transaction, and PostgreSQL delivers them at the
# commit.


def after_commit(using: str, function: Callable[..., Any], *values: Any, **options: Any) -> None:
    """Call a function once the current transaction is committed; without a transaction, now.

    If the caller commits the transaction itself, the function is not called, and the upkeep looks for its work.
    """
    if commits_itself(connections[using]):
        notify_after_commit(using, NOTIFY_BLOCKED)
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
        if not _will_be_prepared(connections[using]):
            run(using, statement, *values)
    else:
        after_commit(using, run, using, statement, *values)


def _will_be_prepared(connection: Any) -> bool:
    """Return whether psycopg has begun a two-phase transaction, by ``tpc_begin()``.

    PostgreSQL does not prepare a transaction that has sent a NOTIFY. Without it, the regular poll finds the task.
    """
    return getattr(connection.connection, "_tpc", None) is not None


def commits_itself(connection: Any) -> bool:
    """Return whether the caller sends the COMMIT of the current transaction itself."""
    return not has_commit_hooks(connection) and in_transaction(connection)
