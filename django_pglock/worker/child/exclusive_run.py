"""The exclusive run: a task whose workers have died too often gets one more attempt, as the only task of a process.

The same applies to a task that ends its session again and again: see ``rescue.py``.

When a process dies, it is not known which of its tasks was the cause. So each task that was running there counts a
rescue. A task may end FAILED because of its rescues only after an attempt in which it was the only task of its process.
The other tasks were not the cause, and they run to their end. With ``MAX_RESCUES=0`` there is no such attempt: the
first death ends the task.

Such a task, the suspect, waits until no other task runs in the process. While it waits, no other task begins, but a
running task may run for hours. So the suspect waits for some seconds. Then it is postponed for several times as long,
and the process works as usual meanwhile. The next suspect waits twice as long, and so on, until the wait is longer than
the other tasks run. So the process loses only a fixed share of its time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from django_pglock.conf import get_settings
from django_pglock.loggers import WORKER, get_logger
from django_pglock.tasks.claim import Claim
from django_pglock.worker.child.in_flight import InFlight

logger = get_logger(WORKER)

#: Seconds for which a suspect waits until no other task runs. Doubled each time that this is not enough.
WAIT_TIMEOUT = 10.0
#: A suspect is postponed for this multiple of the time for which it has waited. So the threads lose at most one fifth
#: of their time.
POSTPONE_FACTOR = 4


class ExclusiveRun:
    """Delays a suspect until no other task runs in the process, and delays all other tasks until the suspect has ended.

    ``may_postpone``: whether a suspect that has waited for too long is postponed. A process that ends soon must not.
    """

    def __init__(self, in_flight: InFlight, *, may_postpone: bool = True) -> None:
        self.in_flight = in_flight
        self._first_timeout = WAIT_TIMEOUT if may_postpone else math.inf
        self._timeout = self._first_timeout
        self._suspect: Claim | None = None
        self._has_begun = False
        self._waits_since = 0.0
        self._none_before = 0.0

    def hold_back_suspects(self, claims: Sequence[Claim]) -> Sequence[Claim]:
        """Return the claims that may begin now: all, unless one of them is a suspect.

        While suspects are postponed, postpone these as well, and return the others. Otherwise return none: the first
        suspect waits for its exclusive run, and all other claims are given back.
        """
        most = max(1, get_settings().MAX_RESCUES)
        suspects = [claim for claim in claims if claim.rescues >= most]
        if not suspects:
            return claims
        now = time.monotonic()
        if now < self._none_before:
            self.in_flight.add(suspects)
            self.in_flight.abandon(suspects, self._none_before - now)
            return [claim for claim in claims if claim not in suspects]
        suspect = suspects[0]
        text = "%s was rescued %d times. It waits until this worker runs no other task."
        logger.warning(text, suspect, suspect.rescues)
        self._suspect, self._has_begun, self._waits_since = suspect, False, now
        self.in_flight.add(claims)
        for claim in claims:
            if claim is not suspect:
                self.in_flight.give_back(claim)
        self.in_flight.give_back_waiting()
        return ()

    def advance(self) -> bool:
        """Begin the suspect if no other task runs, postpone it if it waits too long. Return whether there is one."""
        suspect = self._suspect
        if suspect is None:
            return False
        if (suspect.id, suspect.attempt) not in self.in_flight.claims:
            self._suspect = None
        elif not self._has_begun and len(self.in_flight.claims) == 1:
            self._has_begun = True
            self._timeout = self._first_timeout
            self.in_flight.begin([suspect])
        elif not self._has_begun and (now := time.monotonic()) - self._waits_since > self._timeout:
            seconds = self._timeout * POSTPONE_FACTOR
            text = "%s waited %.0f s for the other tasks of this worker to end. It is postponed for %.0f s."
            logger.warning(text, suspect, self._timeout, seconds)
            self._suspect, self._none_before, self._timeout = None, now + seconds, self._timeout * 2
            self.in_flight.abandon([suspect], seconds)
        return self._suspect is not None

    def end(self) -> None:
        """Give back a suspect that still waits."""
        if self._suspect is not None and not self._has_begun:
            self.in_flight.give_back(self._suspect)
