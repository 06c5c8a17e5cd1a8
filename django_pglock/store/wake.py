"""Waking sleeping workers after a commit, as rarely as possible.

A NOTIFY takes a lock that serialises the commits of the whole server, so it is sent only when some worker's row says
that it sleeps, and the row is looked at only after the commit. How no wake-up is lost:

- A worker first commits ``is_sleeping``, then looks for work once more, and once again after ``NEGATIVE_TTL`` has
  passed; only then does it wait for a NOTIFY.
- A task committed before one of these looks is found by it. A task committed later is followed by our look at the
  flag, which then is set; or by no look, because this process saw nobody asleep less than ``NEGATIVE_TTL`` ago, and
  then the worker's second look is still to come.
- A process that dies between its commit and the NOTIFY leaves the task to the poll.

One look after a commit serves for all that the transaction has added to a queue.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from django.db import connections

from django_pglock.postgres.connections import connection_for
from django_pglock.postgres.message import literals, send

#: Workers listen here for tasks that can be claimed; the payload is the queue's name.
READY_CHANNEL = "django_pglock_ready"
#: And here for tasks that were scheduled: somebody has to set the alarm for them.
SCHEDULED_CHANNEL = "django_pglock_scheduled"
#: And here for running tasks that somebody has asked to end; the payload is the task's id.
CANCEL_CHANNEL = "django_pglock_cancel"
#: Seconds for which this process trusts "nobody sleeps". A busy producer asks no more often than this.
NEGATIVE_TTL = 0.05

_nobody_slept_at: dict[str, float] = {}
# Channels and queues of which nobody has been told since something was added, by connection. What is rolled back stays:
# then the next commit tells of it, which does no harm.
_untold: WeakKeyDictionary[Any, set[tuple[str, str]]] = WeakKeyDictionary()


def wake_on_commit(using: str, channel: str, queue: str, statement: str) -> None:
    """Wake sleeping workers after the commit, as ``wake`` does, once however often it is asked for before."""
    connection = connections[using]
    if connection.autocommit and _nobody_sleeps(using):
        # It is committed.
        return
    untold = _untold.setdefault(connection, set())
    untold.add((channel, queue))
    connection.on_commit(partial(_wake_once, untold, using, channel, queue, statement), robust=True)


def _wake_once(untold: set[tuple[str, str]], using: str, channel: str, queue: str, statement: str) -> None:
    if (channel, queue) in untold:
        wake(using, channel, queue, statement)
        untold.discard((channel, queue))


def wake(using: str, channel: str, queue: str, statement: str) -> None:
    """Send a NOTIFY for ``queue`` on ``channel`` if a worker sleeps in the database ``using``."""
    if _nobody_sleeps(using):
        return
    now = time.monotonic()
    connection = connection_for(using)
    connection.ensure_connection()
    if send(connection, statement % literals(connection, (channel, queue))) is None:
        _nobody_slept_at[using] = now


def _nobody_sleeps(using: str) -> bool:
    return time.monotonic() - _nobody_slept_at.get(using, -NEGATIVE_TTL) < NEGATIVE_TTL
