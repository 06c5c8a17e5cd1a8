"""Waking sleeping workers after a commit, with as few NOTIFYs as possible.

Each NOTIFY takes a lock that serialises the commits of the whole server. So it is sent only if the row of some worker
says that the worker sleeps, and the row is read only after the commit. Why no wake-up is lost:

- A worker first commits ``is_sleeping``, then polls for work once more, and once again after ``NEGATIVE_TTL`` has
  passed; only then does it wait for a NOTIFY.
- If a task is committed before one of these polls, the poll finds the task. If it is committed later, the process that
  enqueued it reads the flag after that, and the flag is set. Or it does not read the flag, because it saw nobody asleep
  less than ``NEGATIVE_TTL`` ago; then the worker's second poll is still to come.
- If a process dies between its commit and the NOTIFY, the poll finds the task.

One check of the flag after a commit serves for everything that the transaction has added to a queue.

If many workers sleep, only the ``WOKEN_FIRST`` oldest that serve the same queues poll at once. One of them that has no
room for everything calls the others (``wake_others``). All others poll a moment later in any case, once for everything
that came meanwhile: a worker woken first may have frozen, or may not know the function. So a task costs a few polls,
however many workers sleep, and each worker polls in the end.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any
from uuid import UUID
from weakref import WeakKeyDictionary

from django.db import connections

from django_pglock.postgres.connections import connection_for
from django_pglock.postgres.message import literals, send
from django_pglock.store.after_commit import after_commit
from django_pglock.store.statements import filled, rows_of, run

#: Workers listen here for tasks that can be claimed; the payload is the queue's name.
READY_CHANNEL = "django_pglock_ready"
#: Workers listen here for tasks that were scheduled, to set their alarm; the payload is the queue's name.
SCHEDULED_CHANNEL = "django_pglock_scheduled"
#: Workers listen here for requests to end a running task, or for its stack; the payload is the task's id.
CANCEL_CHANNEL = "django_pglock_cancel"
#: Workers listen here for tasks that the workers woken first have not taken; the payload is the queue's name.
OTHERS_CHANNEL = "django_pglock_others"
#: The number of sleeping workers that poll at once, the oldest ones: more than one, because one may be frozen.
WOKEN_FIRST = 4
#: Seconds for which this process relies on having seen nobody asleep. A busy producer asks no more often than this.
NEGATIVE_TTL = 0.05

# Wakes sleeping workers, if there are any. Sent after the commit: if it were sent before, a worker could poll, find
# nothing and fall asleep between our read of its flag and our commit. The answer is not needed on the disk: if the
# server crashes, the poll finds the task.
WAKE = """
SELECT set_config('synchronous_commit', 'off', true), pg_notify(channel, queue)
FROM (VALUES %s) AS news (channel, queue)
WHERE EXISTS (SELECT FROM {worker} WHERE is_sleeping)
"""

# Calls the workers that poll a moment later only, if something in these queues is still ready.
WAKE_OTHERS = """
SELECT set_config('synchronous_commit', 'off', true), pg_notify(%s, news.queue)
FROM unnest(%s::text[]) AS news (queue)
WHERE EXISTS (SELECT FROM {task} AS task
              WHERE task.status = 'READY' AND task.fair_key IS NULL AND task.queue = news.queue)
   OR EXISTS (SELECT FROM {task} AS task
              WHERE task.status = 'READY' AND task.fair_key IS NOT NULL AND task.queue = news.queue)
"""

_nobody_slept_at: dict[str, float] = {}
# By connection: channels and queues to which something was added, and which are not notified yet. After a rollback they
# stay, and the next commit notifies for them, which does no harm.
_pending_notifications: WeakKeyDictionary[Any, set[tuple[str, str]]] = WeakKeyDictionary()


def wake(using: str, queues: Iterable[str], channel: str = READY_CHANNEL) -> None:
    """Wake sleeping workers for these queues once the current transaction is committed."""
    for queue in set(queues):
        _wake_on_commit(using, channel, queue)


def wake_others(using: str, queues: Iterable[str]) -> bool:
    """Have all workers poll now, if something is still ready in these queues. Returns whether they do."""
    return bool(run(using, WAKE_OTHERS, OTHERS_CHANNEL, list(queues)))


def note_sleep(using: str, worker: UUID, *, is_sleeping: bool) -> None:
    """Write into a worker's row whether it wants to be woken by NOTIFY."""
    rows_of("Worker", using).filter(pk=worker).update(is_sleeping=is_sleeping)


def _wake_on_commit(using: str, channel: str, queue: str) -> None:
    connection = connections[using]
    if connection.autocommit and _nobody_sleeps(using):
        # It is committed.
        return
    pending = _pending_notifications.setdefault(connection, set())
    pending.add((channel, queue))
    after_commit(using, _wake_once, pending, using)


def _wake_once(pending: set[tuple[str, str]], using: str) -> None:
    if pending:
        # One message for all queues: a bulk retry adds to hundreds, and each message waits for a commit.
        _notify(using, sorted(pending))
        pending.clear()


def _notify(using: str, news: list[tuple[str, str]]) -> None:
    if _nobody_sleeps(using):
        return
    now = time.monotonic()
    connection = connection_for(using)
    connection.ensure_connection()
    values = ", ".join("({}, {})".format(*literals(connection, each)) for each in news)
    if send(connection, filled(WAKE) % values) is None:
        _nobody_slept_at[using] = now


def _nobody_sleeps(using: str) -> bool:
    return time.monotonic() - _nobody_slept_at.get(using, -NEGATIVE_TTL) < NEGATIVE_TTL
