"""Receives notifications (LISTEN/NOTIFY) in the session of the heartbeat.

Notifications only make a worker faster. If one is lost, a poll finds the task.
"""

from __future__ import annotations

import contextlib
import math
import random
import selectors
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from django_pglock.store.wake import OTHERS_CHANNEL, READY_CHANNEL, REQUEST_CHANNEL, SCHEDULED_CHANNEL

if TYPE_CHECKING:
    from django.db.backends.postgresql.base import DatabaseWrapper

#: A new selector is made for each wait. With epoll, the default on Linux, this would take four more system calls.
Selector = getattr(selectors, "PollSelector", selectors.SelectSelector)
#: Seconds after which a worker that is not woken first polls. A fifth more or less, so that not all poll at once.
POSTPONED_FOR = 1.0
#: Seconds for which the thread that receives notifications waits after it has woken the fetcher. Python runs one thread
#: at a time. Without the wait, the fetcher would claim only after this thread has prepared its next wait.
PAUSE_AFTER_WAKEUP = 0.00005


CHANNELS = (READY_CHANNEL, OTHERS_CHANNEL, SCHEDULED_CHANNEL, REQUEST_CHANNEL)


class NotificationSession:
    """Receives the notifications for workers in a session.

    ``on_notification`` is called with channel and payload of each notification, in the thread that uses the session.
    """

    def __init__(self, on_notification: Callable[[str, str], None]) -> None:
        self.on_notification = on_notification

    def listen(self, connection: DatabaseWrapper) -> None:
        """Begin to listen in a session that has just been opened."""
        raw: Any = connection.connection
        # psycopg calls this for notifications that arrive while a statement runs.
        raw.add_notify_handler(lambda note: self.on_notification(note.channel, note.payload))
        with connection.cursor() as cursor:
            cursor.execute("; ".join(f"LISTEN {channel}" for channel in CHANNELS))

    def receive(self, connection: DatabaseWrapper) -> None:
        """Pass on the notifications since the last statement. Raises psycopg's error if the session has ended."""
        raw: Any = connection.connection
        raw.pgconn.consume_input()
        while note := raw.pgconn.notifies():
            self.on_notification(note.relname.decode(), note.extra.decode())


class Listener:
    """Calls a callback for each notification, in the thread of the heartbeat.

    - ``ready``: with the name of a queue with ready tasks, and with whether this worker is one of those woken first.
    - ``scheduled``: a task was scheduled.
    - ``requested``: with the id of a task for which there is a request.
    - ``missed``: notifications may have been missed. The owner of the session calls it when a session begins to listen.

    If this worker is not ``is_woken_first``, ``ready`` is called a moment later, or when the workers woken first wake
    the others.
    """

    def __init__(
        self,
        *,
        ready: Callable[[str, bool], None],
        scheduled: Callable[[], None],
        requested: Callable[[str], None],
        missed: Callable[[], None],
    ) -> None:
        self.ready = ready
        self.scheduled = scheduled
        self.requested = requested
        self.missed = missed
        #: Whether this worker polls at once, because few older workers sleep. ``store/wake.py`` says why not all do.
        self.is_woken_first = True
        # Queues of notifications that are postponed for a moment, and when to pass them on.
        self._postponed: set[str] = set()
        self._pass_on_at = math.inf

    def pass_on_postponed(self) -> None:
        """Pass on the postponed notifications, if their time has come."""
        if time.monotonic() >= self._pass_on_at:
            postponed, self._postponed, self._pass_on_at = self._postponed, set(), math.inf
            for queue in postponed:
                self.ready(queue, False)

    def due_in(self) -> float:
        """Return the seconds until ``pass_on_postponed`` has to be called; infinite: never."""
        return max(0.0, self._pass_on_at - time.monotonic())

    def receive(self, channel: str, payload: str) -> None:
        """Call the callback for one notification."""
        if channel == OTHERS_CHANNEL:
            self.ready(payload, False)
        elif channel == READY_CHANNEL and self.is_woken_first:
            self.ready(payload, True)
            time.sleep(PAUSE_AFTER_WAKEUP)
        elif channel == READY_CHANNEL:
            self._postponed.add(payload)
            moment = random.uniform(0.8, 1.2) * POSTPONED_FOR  # noqa: S311
            self._pass_on_at = min(self._pass_on_at, time.monotonic() + moment)
        elif channel == REQUEST_CHANNEL:
            self.requested(payload)
        else:
            self.scheduled()


class SelfPipe:
    """Wakes a thread that waits for data on a socket."""

    def __init__(self) -> None:
        self._pair: tuple[socket.socket, socket.socket] | None = None

    def open(self) -> None:
        """Open the sockets. Before that, ``wake()`` has no effect."""
        self._pair = socket.socketpair()
        for end in self._pair:
            end.setblocking(False)

    def wake(self) -> None:
        """End the present wait or, if there is none, the next one. Thread-safe."""
        if self._pair is not None:
            # An error means that the buffer is full, or that the socket is closed.
            with contextlib.suppress(OSError):
                self._pair[1].send(b"!")

    def wait(self, timeout: float, *channels: Any) -> bool:
        """Wait for ``wake()`` or for data on a channel, up to ``timeout`` seconds. Return whether it was ``wake()``."""
        assert self._pair is not None  # noqa: S101 - made by open()
        ours = self._pair[0]
        with Selector() as selector:
            for channel in (ours, *channels):
                selector.register(channel, selectors.EVENT_READ)
            ready = selector.select(timeout)
        if any(key.fileobj is ours for key, _ in ready):
            with contextlib.suppress(BlockingIOError):
                return bool(ours.recv(4096))
        return False

    def close(self) -> None:
        """Close the sockets."""
        for end in self._pair or ():
            end.close()
