"""When a heartbeat is due, late or too old: for the heartbeat of a worker, and for the one of a supervisor."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

from django_pglock.conf import get_settings
from django_pglock.store.liveness import LATE, REST_INTERVALS, silent_after
from django_pglock.worker.service import LONGEST_PAUSE

#: Seconds for the supervisor to answer, as a share of the interval. If it does not answer, there is still time for a
#: heartbeat of the worker itself before the heartbeat counts as missing.
ANSWERED_WITHIN = 0.5
#: Seconds from the first request to the statement of the supervisor, as a share of the interval. Further requests may
#: arrive meanwhile.
GATHERED_WITHIN = 0.02
#: The least ``connect_timeout`` in seconds. libpq treats a smaller value as this one.
LEAST_TO_CONNECT = 2


class HeartbeatTiming(NamedTuple):
    """The times of a heartbeat in seconds, from ``HEARTBEAT_INTERVAL`` and ``HEARTBEAT_LIMIT``.

    ``silent_after``: without a heartbeat for this time a worker counts as dead.
    """

    interval: float
    limit: float
    silent_after: float

    @property
    def statement_timeout(self) -> float:
        """A third of the limit: after a timeout, a heartbeat must be repeated before the worker counts as dead."""
        return self.limit / 3

    @property
    def longest_pause(self) -> float:
        """Half an interval, because after an outage the other services wait for the first heartbeat."""
        return min(LONGEST_PAUSE, self.interval / 2)

    @property
    def answer_timeout(self) -> float:
        """How long a worker waits for the answer of its supervisor."""
        return self.interval * ANSWERED_WITHIN

    def connect_timeout(self, failures: int, configured: int) -> int:
        """Return the ``connect_timeout`` of an attempt after ``failures``, if a supervisor may soon beat again.

        The next attempt may take longer, up to the ``configured`` timeout. For libpq, 0 means no limit.
        """
        seconds: int = max(LEAST_TO_CONNECT, round(self.interval)) * 2 ** min(failures, 10)
        return min(seconds, max(0, configured) or seconds)

    def is_stale(self, age: float, *, is_connected: bool) -> bool:
        """Return whether a worker may count as dead: its last heartbeat is too old, or old and it has no session."""
        return age > self.silent_after or (not is_connected and age > 2 * self.interval)

    def is_late(self, age: float, *, is_resting: bool) -> bool:
        """Return whether a heartbeat is overdue. A worker that rests leaves out heartbeats."""
        return age >= LATE * (REST_INTERVALS if is_resting else 1) * self.interval

    def gathered_at(self, requested_at: float) -> float:
        """Return when the supervisor writes a requested heartbeat, if requests of other processes are missing."""
        return requested_at + GATHERED_WITHIN * self.interval

    def is_outdated(self, request_age: float) -> bool:
        """Return whether a request is too old to be served: the worker has been stopped, and may have died since."""
        return request_age > self.interval

    def next_in(self, since_start: float) -> float:
        """Return the seconds until the next multiple of the interval. All processes of a supervisor beat then."""
        return self.interval - since_start % self.interval


def heartbeat_timing() -> HeartbeatTiming:
    """Return the times that the present settings give."""
    settings = get_settings()
    return HeartbeatTiming(settings.HEARTBEAT_INTERVAL, settings.HEARTBEAT_LIMIT, silent_after())


# When an idle worker leaves out beats, because enough older workers beat often (``store/liveness.py``).
#
# It beats once more before it claims anything, so no task has a worker whose last heartbeat is older than others
# tolerate.


#: After the first interval without a beat, each further interval of a rest is multiplied by a factor between these.
REST_JITTER = (0.6, 1.4)
#: The probability that a worker rests after a beat, if its last rest was interrupted. A new task, or a restart of the
#: server, makes all resting workers beat at the same time. If all of them then rested, and the older workers died, no
#: worker would notice it before the end of a full rest.
REST_PROBABILITY = 1 / 3


class Rest:
    """The rest of one worker. Only the heartbeat's thread calls its methods, except for ``request_beat()``.

    ``is_possible``: whether this worker may rest at all. It relies on others that serve the same queues.
    """

    def __init__(self, *, is_possible: bool) -> None:
        self._is_possible = is_possible
        #: Whether the last reply allows a rest.
        self.is_allowed = False
        #: Whether the worker has left out a beat since its last one.
        self.is_on = False
        #: Whether another thread has requested a beat since the last one.
        self.is_beat_requested = False
        # Whether nothing has ended the last rest before its time.
        self._was_full = False

    def note_reply(self, *, may_rest: bool) -> None:
        """Note what the reply to a beat says about a rest."""
        self.is_allowed = self._is_possible and may_rest

    def request_beat(self) -> None:
        """Request that the worker beats at once if it rests. For other threads, which then wake the heartbeat's."""
        self.is_beat_requested = True

    def end(self) -> bool:
        """Note that a beat is written; return whether another thread has requested it.

        The order matters. A thread that reads that the worker does not rest must not then read the age of the previous
        beat. A thread that has requested a beat while the worker rested has to be woken.
        """
        self.is_on = False
        is_requested, self.is_beat_requested = self.is_beat_requested, False
        return is_requested

    def intervals(self, first: float) -> Iterator[float]:
        """Yield the seconds of each interval to wait until the next beat: ``first``, and more if the worker rests.

        The caller breaks off if a beat is needed. From the second interval on the worker rests.
        """
        begins = self.is_allowed and (self._was_full or random.random() < REST_PROBABILITY)  # noqa: S311
        self._was_full = False
        yield first
        if begins:
            for _ in range(REST_INTERVALS - 1):
                self.is_on = True
                # With jitter, because workers that have started together should not beat together. If the older workers
                # die, one of the resting ones soon notices it.
                yield random.uniform(*REST_JITTER) * get_settings().HEARTBEAT_INTERVAL  # noqa: S311
            self._was_full = True
