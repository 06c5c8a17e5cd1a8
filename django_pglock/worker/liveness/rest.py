"""When an idle worker leaves out beats, because enough older workers beat often (``store/liveness.py``).

It beats once more before it claims anything, so no task has a worker whose last heartbeat is older than others
tolerate.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from django_pglock.conf import get_settings
from django_pglock.store.liveness import REST_INTERVALS

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
