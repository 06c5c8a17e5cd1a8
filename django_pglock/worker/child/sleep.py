"""The sleep of a worker that has found nothing to claim, and the notifications that end it (``store/wake.py``).

The main thread receives them from the parent, and the fetcher asks here which queues they have named. So this file has
the state that both share: a deque of what the other threads have noted, which only the fetcher takes.
"""

from __future__ import annotations

import time
from collections import deque
from uuid import UUID

from django_pglock.store.wake import MOST_HOPS, wake_others, write_sleep_flag
from django_pglock.worker.child.in_flight import InFlight
from django_pglock.worker.queues import Queues


class Sleep:
    """Whether this worker waits for notifications, and which queues they have named.

    ``note_ready()``, ``note_missed()`` and ``note_flag_unset()`` are for other threads. All other methods are for the
    fetcher's thread.
    """

    def __init__(self, in_flight: InFlight, using: str, worker: UUID, queues: Queues) -> None:
        self.in_flight = in_flight
        self.using = using
        self.worker = worker
        self.queues = queues
        #: When this worker began to wait for notifications, by time.monotonic(); None: it does not wait for any.
        self.since: float | None = None
        # What other threads have noted: a queue with a number of hops; None: notifications may have been missed.
        self._noted: deque[tuple[str, int] | None] = deque()
        # Queues that notifications have named since the last poll.
        self._notified: set[str] = set()
        # Whether notifications of other queues may have been missed since the last poll.
        self._has_missed = False
        # Queues in which ready tasks may be left, and how often the notifications about them were passed on.
        self._unclaimed: dict[str, int] = {}

    def note_ready(self, queue: str, hops: int = 0) -> None:
        """Note that tasks of ``queue`` are ready, and have the fetcher poll at once.

        ``hops``: how often workers that could claim nothing have passed the notification on.
        """
        if self.queues.serves(queue):
            self._noted.append((queue, hops))
            self.in_flight.notify_fetcher()

    def note_missed(self) -> None:
        """Note that notifications may have been missed, and have the fetcher poll all queues at once."""
        self._noted.append(None)
        self.in_flight.notify_fetcher()

    def note_flag_unset(self) -> None:
        """Note that the row does not say that this worker sleeps: it may have been deleted, and inserted again.

        If this worker sleeps, the fetcher sets the flag again, because until then no notification comes.
        """
        if self.since is not None:
            self.since = None
            self.in_flight.notify_fetcher()

    @property
    def is_notified(self) -> bool:
        """Whether a notification has come since the last poll."""
        self._take_noted()
        return bool(self._notified)

    def take_notified(self) -> set[str]:
        """Return the queues that notifications have named since the last poll; none if some may have been missed."""
        self._take_noted()
        notified, self._notified = self._notified, set()
        has_missed, self._has_missed = self._has_missed, False
        return set() if has_missed else notified

    def _take_noted(self) -> None:
        while self._noted:
            if (noted := self._noted.popleft()) is None:
                self._has_missed = True
            else:
                queue, hops = noted
                self._notified.add(queue)
                self._unclaimed[queue] = hops

    def begin(self) -> None:
        """Ask for notifications.

        The caller must poll afterwards, because no notification comes for tasks that were ready before.
        """
        self._set_flag(is_sleeping=True)
        self.since = time.monotonic()

    def end(self) -> None:
        """Ask for no more notifications, if this worker has asked for them."""
        if self.since is not None:
            self._set_flag(is_sleeping=False)
            self.since = None

    def _set_flag(self, *, is_sleeping: bool) -> None:
        write_sleep_flag(self.using, self.worker, is_sleeping=is_sleeping)

    @property
    def has_unclaimed(self) -> bool:
        """Whether ready tasks may be left in a queue of which a notification has come."""
        self._take_noted()
        return bool(self._unclaimed)

    def note_all_claimed(self) -> None:
        """Note that nothing is left in the queues that notifications have named, as far as this worker knows."""
        self._unclaimed = {}

    def wake_others(self, *, has_claimed: bool = True) -> None:
        """Wake other workers, if something may be left in the queues that notifications have named.

        A worker that ``has_claimed`` nothing may not know the functions. So it wakes others only a few times, or
        workers would wake each other without end.
        """
        self._take_noted()
        unclaimed, self._unclaimed = self._unclaimed, {}
        for hops in {*unclaimed.values()}:
            queues = [queue for queue, each in unclaimed.items() if each == hops]
            if has_claimed or hops < MOST_HOPS:
                wake_others(self.using, queues, self.worker, hops=0 if has_claimed else hops + 1)
