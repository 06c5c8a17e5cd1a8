"""Receives notifications (LISTEN/NOTIFY) and wakes other parts. Only for speed: polling finds what is missed."""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Callable
from typing import Any

from django.db import connections

from django_pglock.store.wake import CANCEL_CHANNEL, READY_CHANNEL, SCHEDULED_CHANNEL
from django_pglock.worker.service import ConnectedService

#: Seconds without a notification after which the listener asks whether the server is still there.
BETWEEN_QUESTIONS = 20.0


class Listener(ConnectedService):
    """Calls ``ready`` with the queue's name, ``scheduled``, or ``cancelled`` with the task's id for each notification.

    It calls them in its own thread. It calls ``missed`` whenever it begins to listen, because notifications may have
    been sent before.
    """

    name = "listener"

    def __init__(
        self,
        using: str,
        *,
        ready: Callable[[str], None],
        scheduled: Callable[[], None],
        cancelled: Callable[[str], None],
        missed: Callable[[], None],
    ) -> None:
        super().__init__(using)
        self.ready = ready
        self.scheduled = scheduled
        self.cancelled = cancelled
        self.missed = missed
        # The listener waits for the database's socket and for this pair, so that wake() can end the wait.
        self._pair: tuple[socket.socket, socket.socket] | None = None

    def start(self) -> None:
        self._pair = socket.socketpair()
        super().start()

    def wake(self) -> None:
        if self._pair is not None:
            with contextlib.suppress(OSError):  # it has ended already
                self._pair[0].send(b"!")

    def finish(self) -> None:
        for end in self._pair or ():
            end.close()

    def connected(self) -> None:
        with connections[self.using].cursor() as cursor:
            cursor.execute(f"LISTEN {READY_CHANNEL}")
            cursor.execute(f"LISTEN {SCHEDULED_CHANNEL}")
            cursor.execute(f"LISTEN {CANCEL_CHANNEL}")
        self.missed()

    def turn(self) -> None:
        raw: Any = connections[self.using].connection
        assert self._pair is not None  # noqa: S101 - made by start()
        self.note_life(BETWEEN_QUESTIONS)
        heard, _, _ = select.select([raw.fileno(), self._pair[1]], [], [], BETWEEN_QUESTIONS)
        self.note_life()
        if not heard:
            # Either there was no notification, or the server is gone.
            with connections[self.using].cursor() as cursor:
                cursor.execute("SELECT 1")
        for note in raw.notifies(timeout=0):
            if note.channel == READY_CHANNEL:
                self.ready(note.payload)
            elif note.channel == CANCEL_CHANNEL:
                self.cancelled(note.payload)
            else:
                self.scheduled()
