"""The advisory locks of workers: one that a session of each worker holds, and one of a round of upkeep.

While the worker's lock is held, missing heartbeats are tolerated for longer. One worker at a time does a round,
which is one transaction.
"""

from __future__ import annotations

from django_pglock.keys.reserved import UPKEEP, WORKER
from django_pglock.postgres.connections import backend_pid, connection_for
from django_pglock.store.statements import BY_INDEX, run

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


#: The first statement of a round. It tries to take the lock, and limits how long the session may be idle in the
#: transaction. Both end with the transaction, so they work behind a pooler as well.
TRY_UPKEEP_LOCK = f"""
SELECT pg_try_advisory_xact_lock({UPKEEP}, 0), set_config('idle_in_transaction_session_timeout', '3s', true), {BY_INDEX}
"""


def try_upkeep_lock(using: str) -> bool:
    """Try to take the lock until the end of the current transaction. Return whether it was free."""
    [(is_taken, *_settings)] = run(using, TRY_UPKEEP_LOCK)
    return bool(is_taken)
