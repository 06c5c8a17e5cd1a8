"""The last chance of a task that has been running each time when its worker died: it gets it alone.

Nobody can say which of the tasks of a process took it down, so all of them count a rescue. The one that ends FAILED for
it must have been the only one that ran; those who were only beside it are acquitted by running to their end.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from django_pglock.conf import get_settings
from django_pglock.tasks.claim import Claim
from django_pglock.worker.hand import Hand

logger = logging.getLogger("django_pglock.worker")


class LastChance:
    """Holds one such claim until nothing else runs in the process, and everything else until that one has ended."""

    def __init__(self, hand: Hand) -> None:
        self.hand = hand
        self._suspect: Claim | None = None
        self._has_begun = False

    def sift(self, claims: Sequence[Claim]) -> Sequence[Claim]:
        """Return the claims that may begin now: all, unless one of them needs to be alone."""
        most = max(1, get_settings().MAX_RESCUES)
        suspect = next((claim for claim in claims if claim.rescues >= most), None)
        if suspect is None:
            return claims
        logger.warning("%r was rescued %d times; it runs alone now.", suspect, suspect.rescues)
        self._suspect, self._has_begun = suspect, False
        self.hand.hold(claims)
        for claim in claims:
            if claim is not suspect:
                self.hand.release(claim)
        self.hand.give_back()
        return ()

    def is_on(self) -> bool:
        """Say whether a claim waits to be alone or is. Lets it begin when it is."""
        suspect = self._suspect
        if suspect is None:
            return False
        if (suspect.id, suspect.attempt) not in self.hand.claims:
            self._suspect = None
        elif not self._has_begun and len(self.hand.claims) == 1:
            self._has_begun = True
            self.hand.inbox.put(suspect)
        return self._suspect is not None

    def end(self) -> None:
        """Give back a claim that still waits."""
        if self._suspect is not None and not self._has_begun:
            self.hand.release(self._suspect)
