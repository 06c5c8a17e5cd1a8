"""The last chance of a task that has been running each time when its worker died: it gets it alone.

Nobody can say which of the tasks of a process took it down, so all of them count a rescue. The one that ends FAILED for
it must have been the only one that ran; those who were only beside it are acquitted by running to their end.

While one waits to be alone nothing else begins, and what runs beside it may run for hours. So it waits for some seconds
and is then put off for some times as long, in which the process works as usual. The next one waits twice as long: at
last that is longer than the others run, and before it the process has lost a fixed share of its time and no more.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence

from django_pglock.conf import get_settings
from django_pglock.tasks.claim import Claim
from django_pglock.worker.in_flight import Hand

logger = logging.getLogger("django_pglock.worker")

#: Seconds for which a task waits to be alone; doubled each time that was not enough, until one was.
PATIENCE = 10.0
#: How many times as long it is put off then. The threads lose one part in five of their time at most.
REST = 4


class LastChance:
    """Holds one such claim until nothing else runs in the process, and everything else until that one has ended.

    ``puts_off`` is whether a claim may be put off that has waited for long: not where the process ends soon.
    """

    def __init__(self, hand: Hand, *, puts_off: bool = True) -> None:
        self.hand = hand
        self._first_patience = PATIENCE if puts_off else math.inf
        self._patience = self._first_patience
        self._suspect: Claim | None = None
        self._has_begun = False
        self._waits_since = 0.0
        self._rests_until = 0.0

    def sift(self, claims: Sequence[Claim]) -> Sequence[Claim]:
        """Return the claims that may begin now: all, unless one of them needs to be alone."""
        most = max(1, get_settings().MAX_RESCUES)
        suspects = [claim for claim in claims if claim.rescues >= most]
        if not suspects:
            return claims
        now = time.monotonic()
        if now < self._rests_until:
            self._put_off(suspects, self._rests_until - now)
            return [claim for claim in claims if claim not in suspects]
        suspect = suspects[0]
        logger.warning("%r was rescued %d times; it waits to run alone.", suspect, suspect.rescues)
        self._suspect, self._has_begun, self._waits_since = suspect, False, now
        self.hand.hold(claims)
        for claim in claims:
            if claim is not suspect:
                self.hand.release(claim)
        self.hand.give_back()
        return ()

    def is_on(self) -> bool:
        """Say whether a claim waits to be alone or is. Lets it begin when it is; puts it off when that takes long."""
        suspect = self._suspect
        if suspect is None:
            return False
        if (suspect.id, suspect.attempt) not in self.hand.claims:
            self._suspect = None
        elif not self._has_begun and len(self.hand.claims) == 1:
            self._has_begun = True
            self._patience = self._first_patience
            self.hand.begin(suspect)
        elif not self._has_begun and time.monotonic() - self._waits_since > self._patience:
            self._rest(suspect)
        return self._suspect is not None

    def _rest(self, suspect: Claim) -> None:
        """Let the others go on for a while."""
        seconds = self._patience * REST
        logger.warning("%r was not alone for %.0f s; it is put off for %.0f s.", suspect, self._patience, seconds)
        self._suspect, self._rests_until = None, time.monotonic() + seconds
        self._patience *= 2
        self._put_off([suspect], seconds)

    def _put_off(self, suspects: Sequence[Claim], seconds: float) -> None:
        self.hand.hold(suspects)
        self.hand.abandon(suspects, seconds)

    def end(self) -> None:
        """Give back a claim that still waits."""
        if self._suspect is not None and not self._has_begun:
            self.hand.release(self._suspect)
