"""Keys at which tasks wait, and how they get through.

A task with a key is BLOCKED until it is *admitted*: made READY, for any worker to claim. So the claims know nothing of
keys, and a hundred thousand tasks that wait for one are in nobody's way.

Two things let a task through, and each commits before it looks: whoever enqueues commits the task and then admits;
whoever finishes one commits the end and then admits. Admitting to a key is done by one at a time, so the later of the
two sees what the other has committed. What a crash leaves undone between the two, upkeep does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any

from django.db import OperationalError, connections, transaction
from psycopg.errors import LockNotAvailable

from django_pglock.store import statements
from django_pglock.store.sql import run_together
from django_pglock.store.wake import wake
from django_pglock.tasks.states import TaskStatus

#: Keys that are admitted to in one transaction.
KEYS_AT_ONCE = 1000
#: What a key begins with at which tasks wait for tokens.
RATED = "%rate "
#: Who has one of these statuses will finish, and admit to its key then.
ADMITTED = (TaskStatus.READY, TaskStatus.RUNNING)


def admit(using: str, keys: Iterable[str | None]) -> int:
    """Make READY what these keys have room for, first come, first served. Returns how many tasks that were."""
    wanted = sorted({key for key in keys if key is not None})
    queues: list[str] = []
    for start in range(0, len(wanted), KEYS_AT_ONCE):
        queues += _admit(using, wanted[start : start + KEYS_AT_ONCE])
    wake(using, queues)
    return len(queues)


def _admit(using: str, keys: list[str]) -> list[str]:
    rated = [key for key in keys if key.startswith(RATED)]
    plain = [key for key in keys if not key.startswith(RATED)]
    rows = _admit_by(using, statements.ADMIT_NEXT, plain) if plain else []
    queues = [queue for queue, _ in rows if queue is not None]
    # Those of which the small statement says that they are not as simple as that.
    others = sorted(rated + [key for _, key in rows if key is not None])
    return queues + [queue for (queue,) in _admit_by(using, statements.ADMIT, others)] if others else queues


def _admit_by(using: str, statement: str, keys: list[str], values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
    # Nobody waits for this to be on the disk: what a crash of the server takes, upkeep does again.
    is_own = not connections[using].in_atomic_block
    unsynced = [("SET LOCAL synchronous_commit = off", ())] if is_own else []
    # Two statements, so that the second one's snapshot is younger than the lock.
    return run_together(using, *unsynced, (statements.LOCK_KEYS, [keys]), (statement, values or [keys]))


def admit_own(using: str, id_: int, key: str, *, is_alone: bool) -> None:
    """Admit to the key of one task that was enqueued, after its commit. ``is_alone``: nobody runs beside it.

    By a statement that is cheaper than ``admit``, and in most cases enough.
    """
    values = (key, key, id_, id_)
    try:
        [(queue, other)] = _admit_by(using, statements.ADMIT_OWN, [key], values)
    except OperationalError as error:
        if not isinstance(error.__cause__, LockNotAvailable):
            raise
        # Somebody has it locked already, as to cancel it.
        queue, other = None, None
    if queue is not None:
        wake(using, [queue])
    elif not (is_alone and other in ADMITTED):
        admit(using, [key])


def admit_on_commit(using: str, keys: Collection[str | None]) -> None:
    """Admit once the current transaction is committed."""
    if any(key is not None for key in keys):
        transaction.on_commit(partial(admit, using, keys), using=using, robust=True)
