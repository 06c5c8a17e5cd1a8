"""The advisory lock that a session of a worker holds. While it is held, missing heartbeats are tolerated for longer."""

from __future__ import annotations

from django_pglock.keys.reserved import WORKER
from django_pglock.postgres.connections import backend_pid, connection_for
from django_pglock.store.statements import run

#: Takes the worker's lock. NULL behind a pooler: there the lock would stay in a session that other clients use. CASE,
#: because the server must compare the process numbers before it tries to take the lock.
LOCK_WORKER = "SELECT CASE WHEN pg_backend_pid() = %s THEN pg_try_advisory_lock(%s, %s) END"
UNLOCK_WORKER = "SELECT pg_advisory_unlock(%s, %s)"


def lock_worker(using: str, number: int) -> bool | None:
    """Take the lock of this number in the present session. False: another session has it. None: behind a pooler."""
    [(is_held,)] = run(using, LOCK_WORKER, backend_pid(connection_for(using)), WORKER, number)
    return is_held  # type: ignore[no-any-return]


def unlock_worker(using: str, number: int) -> None:
    """Release the lock, which the present session holds."""
    run(using, UNLOCK_WORKER, WORKER, number)
