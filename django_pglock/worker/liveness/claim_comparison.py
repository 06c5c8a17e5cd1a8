"""Compares this worker's tasks in the table with those in flight, and gives back claims whose answer was lost.

A claim whose answer was lost may be committed after the fetcher, in its next session, has searched for such claims.
Some seconds later, the claim either is committed or will never be.
"""

from __future__ import annotations

import time
from uuid import UUID

from django_pglock.conf import get_settings
from django_pglock.store.give_back import give_back, server_time
from django_pglock.worker.in_flight import InFlight
from django_pglock.worker.service import logger

#: After this multiple of HEARTBEAT_LIMIT, a claim whose answer was lost either is committed or will never be, and a
#: comparison has run since then.
CERTAIN_AFTER = 3.0


class ClaimComparison:
    """Compares once in ``HEARTBEAT_LIMIT``, as long as the worker has claims or may have claims."""

    def __init__(self, in_flight: InFlight, using: str, worker: UUID) -> None:
        self.in_flight = in_flight
        self.using = using
        self.worker = worker
        self._compared_at = time.monotonic()
        # How many tasks had been claimed at the last comparison, and whether tasks were in flight then.
        self._claimed = 0
        self._had_claims = False

    @property
    def is_due(self) -> bool:
        """Whether it is time to compare."""
        limit, now = get_settings().HEARTBEAT_LIMIT, time.monotonic()
        if now - self._compared_at < limit or self.in_flight.is_claiming:
            return False
        return (
            self._had_claims
            or bool(self.in_flight.claims)
            or self.in_flight.claimed != self._claimed
            or now - self.in_flight.answer_lost_at < CERTAIN_AFTER * limit
        )

    def compare(self) -> None:
        """Give back old claims of this worker that are not in flight."""
        # This process may freeze between the list and the statement, and claims that it makes meanwhile are not in the
        # list. A claim of a group may wait for a lock for longer than the limit, and its date is that of its message.
        # The order matters: claims that begin after the first line are excluded by their date.
        before, group_keys = server_time(self.using), self.in_flight.group_keys_being_claimed()
        if self.in_flight.is_claiming:
            return
        self._compared_at = time.monotonic()
        self._claimed, self._had_claims = self.in_flight.claimed, bool(self.in_flight.claims)
        known, limit = self.in_flight.task_ids(), get_settings().HEARTBEAT_LIMIT
        lost = give_back(self.using, self.worker, known, older_than=limit, before=before, except_keys=group_keys)
        if lost:
            logger.warning("Gave back %d tasks that were claimed for this worker and never reached it.", lost)
