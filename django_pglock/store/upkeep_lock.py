"""The lock of an upkeep round: one worker at a time does a round, which is one transaction."""

from __future__ import annotations

from django_pglock.keys.reserved import UPKEEP
from django_pglock.store.statements import BY_INDEX, run

#: The first statement of a round. It tries to take the lock, and limits how long the session may be idle in the
#: transaction. Both end with the transaction, so they work behind a pooler as well.
TRY_UPKEEP_LOCK = f"""
SELECT pg_try_advisory_xact_lock({UPKEEP}, 0), set_config('idle_in_transaction_session_timeout', '3s', true), {BY_INDEX}
"""


def try_upkeep_lock(using: str) -> bool:
    """Try to take the lock until the end of the current transaction. Return whether it was free."""
    [(is_taken, *_settings)] = run(using, TRY_UPKEEP_LOCK)
    return bool(is_taken)
