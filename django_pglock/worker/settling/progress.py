"""Writing what running tasks tell of their progress."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING

from django_pglock.store.progress import note_progress
from django_pglock.worker.in_flight import Hand

if TYPE_CHECKING:
    from django_pglock.tasks.claim import Claim


class Progress:
    """The last word of each task in hand, written now and then by the heartbeat, and before its end by the settler.

    Each uses its own session. Never the task's: what an atomic task tells would not be seen before its end.
    """

    def __init__(self, hand: Hand, using: str) -> None:
        self.hand = hand
        self.using = using
        # The last word has to come last, whoever writes.
        self._writing = threading.Lock()

    def note(self) -> None:
        """Write what is new."""
        self._write(list(self.hand.claims.values()))

    def note_last(self, claims: Iterable[Claim]) -> list[Claim]:
        """Write what is new of tasks that are about to be settled. Returns those that are lost, or locked."""
        return self._write(claims)

    def _write(self, claims: Iterable[Claim]) -> list[Claim]:
        told = [claim for claim in claims if claim.progress is not claim.noted_progress]
        if told:
            with self._writing:
                note_progress(self.using, told)
        return [claim for claim in told if claim.progress is not claim.noted_progress]
