"""Whose turn it is to do the upkeep: one worker at a time, for one transaction."""

from __future__ import annotations

from django_pglock.keys.reserved import UPKEEP
from django_pglock.store.sql import BY_INDEX, run

#: The first statement of a round: it tries for the lock, and limits how long the round may stand still. Both hold for
#: this transaction only, so they work behind a pooler as well.
UPKEEP_TURN = f"""
SELECT pg_try_advisory_xact_lock({UPKEEP}, 0), set_config('idle_in_transaction_session_timeout', '3s', true), {BY_INDEX}
"""


def try_upkeep_lock(using: str) -> bool:
    """Try to take the turn until the end of the current transaction; say whether no other worker has it."""
    [(is_taken, *_settings)] = run(using, UPKEEP_TURN)
    return bool(is_taken)
