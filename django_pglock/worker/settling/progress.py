"""Writes the progress that running tasks report."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING

from django_pglock.store.progress import write_progress
from django_pglock.worker.in_flight import InFlight

if TYPE_CHECKING:
    from django_pglock.tasks.claim import Claim


class Progress:
    """Writes the newest progress of each task in flight.

    The service for running tasks writes it from time to time, and the settler once more before the end of the task.
    They use their own sessions. In the session of an atomic task, the progress would be visible only after the commit.
    """

    def __init__(self, in_flight: InFlight, using: str) -> None:
        self.in_flight = in_flight
        self.using = using
        # A lock, so that the newest value is written last, whichever of the two writes it.
        self._writing = threading.Lock()

    @property
    def is_new(self) -> bool:
        """Whether a task in flight has reported progress that is not written yet."""
        return any(claim.progress is not claim.written_progress for claim in list(self.in_flight.claims.values()))

    def write(self) -> None:
        """Write the new progress of all tasks in flight."""
        self._write(list(self.in_flight.claims.values()))

    def write_last(self, claims: Iterable[Claim]) -> list[Claim]:
        """Write the new progress of claims before they are settled. Return the claims with a lost or locked row."""
        return self._write(claims)

    def _write(self, claims: Iterable[Claim]) -> list[Claim]:
        changed = [claim for claim in claims if claim.progress is not claim.written_progress]
        if changed:
            with self._writing:
                write_progress(self.using, changed)
        return [claim for claim in changed if claim.progress is not claim.written_progress]
