"""Writing the progress that running tasks report."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING

from django_pglock.store.progress import note_progress
from django_pglock.worker.in_flight import InFlight

if TYPE_CHECKING:
    from django_pglock.tasks.claim import Claim


class Progress:
    """Writes the newest progress of each task in flight, from time to time, and the settler once more before its end.

    Each uses its own session, never that of the task: others would not see the progress of an atomic task before its
    end.
    """

    def __init__(self, in_flight: InFlight, using: str) -> None:
        self.in_flight = in_flight
        self.using = using
        # The newest value must be written last, whichever of the two writes it.
        self._writing = threading.Lock()

    @property
    def is_new(self) -> bool:
        """Whether a task in flight has reported progress that is not written yet."""
        return any(claim.progress is not claim.noted_progress for claim in list(self.in_flight.claims.values()))

    def note(self) -> None:
        """Write what is new of all tasks in flight."""
        self._write(list(self.in_flight.claims.values()))

    def note_last(self, claims: Iterable[Claim]) -> list[Claim]:
        """Write what is new of claims that are about to be settled. Returns those whose rows are lost or locked."""
        return self._write(claims)

    def _write(self, claims: Iterable[Claim]) -> list[Claim]:
        told = [claim for claim in claims if claim.progress is not claim.noted_progress]
        if told:
            with self._writing:
                note_progress(self.using, told)
        return [claim for claim in told if claim.progress is not claim.noted_progress]
