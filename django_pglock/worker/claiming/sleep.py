"""The sleep of a worker that has found nothing to claim, and the notifications that end it (``store/wake.py``).

The thread of the heartbeat receives the notifications, and the fetcher asks here which queues they have named. So this
file has the state that both share.
"""

from __future__ import annotations

import time
from uuid import UUID

from django_pglock.store.wake import wake_others, write_sleep_flag
from django_pglock.worker.claiming.queues import Queues
from django_pglock.worker.in_flight import InFlight


class Sleep:
    """Whether this worker waits for notifications, and which queues they have named.

    The heartbeat's thread calls ``note_ready()``, ``note_missed()`` and ``note_flag_unset()``, and sets
    ``has_delayed_workers``. All other methods are for the fetcher's thread.
    """

    def __init__(self, in_flight: InFlight, using: str, worker: UUID, queues: Queues) -> None:
        self.in_flight = in_flight
        self.using = using
        self.worker = worker
        self.queues = queues
        #: When this worker began to wait for notifications, by time.monotonic(); None: it does not wait for any.
        self.since: float | None = None
        #: Whether there are sleeping workers that are not woken first, so they poll later.
        self.has_delayed_workers = False
        # Queues that notifications have named since the last poll.
        self._notified: set[str] = set()
        # Whether notifications of other queues may have been missed since the last poll.
        self._has_missed = False
        # Queues of which this worker was notified as one of those woken first, and in which ready tasks may be left.
        self._unclaimed: set[str] = set()
        # Whether the row was deleted and inserted again, so that ``is_sleeping`` is false although this worker waits
        # for notifications.
        self._is_flag_unset = False

    def note_ready(self, queue: str, is_woken_first: bool = False) -> None:
        """Note that tasks of ``queue`` are ready, and have the fetcher poll at once.

        ``is_woken_first``: other workers poll only a moment later, or when this worker wakes them.
        """
        if self.queues.serves(queue):
            self._notified.add(queue)
            if is_woken_first and self.has_delayed_workers:
                self._unclaimed.add(queue)
            self.in_flight.notify_fetcher()

    def note_missed(self) -> None:
        """Note that notifications may have been missed, and have the fetcher poll all queues at once."""
        self._has_missed = True
        self.in_flight.notify_fetcher()

    def note_flag_unset(self) -> None:
        """Have the fetcher set ``is_sleeping`` again, if it sleeps. While the flag is unset no notification comes."""
        if self.since is not None:
            self._is_flag_unset = True
            self.in_flight.notify_fetcher()

    @property
    def is_notified(self) -> bool:
        """Whether a notification has come since the last poll."""
        return bool(self._notified)

    def take_notified(self) -> set[str]:
        """Return the queues that notifications have named since the last poll; none if some may have been missed."""
        notified, self._notified = self._notified, set()
        has_missed, self._has_missed = self._has_missed, False
        return set() if has_missed else notified

    def check_flag(self) -> None:
        """End the sleep if its flag is not in the row any more."""
        if self._is_flag_unset:
            self._is_flag_unset, self.since = False, None

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
        """Whether ready tasks may be left in a queue of which other workers are notified later."""
        return bool(self._unclaimed)

    def note_all_claimed(self) -> None:
        """Note that nothing is left in the queues of which others are notified later, as far as this worker knows."""
        self._unclaimed = set()

    def wake_others(self) -> None:
        """Wake the workers that poll later, if something may be left in the queues that notifications have named."""
        if self._unclaimed:
            # The thread of the heartbeat adds to the set, so it is replaced.
            queues, self._unclaimed = self._unclaimed, set()
            wake_others(self.using, queues)
