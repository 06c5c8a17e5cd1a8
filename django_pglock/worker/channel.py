"""The channel between the parent and one child: a pair of sockets, and messages in JSON, one a line. And their loops.

Each side notices the death of the other, because the kernel closes the sockets of a dead process. To send never waits:
what the other side does not read is kept, and sent later.

Messages of the parent: ``start`` (the child's options), ``beat`` (when the last heartbeat was begun), ``wake`` (a queue
has ready tasks), ``poll`` (notifications may be missing), ``cancel`` and ``stack`` (tasks by id and attempt), ``drain``
(finish the running tasks), ``end`` (give all tasks back now).

Messages of the child: ``ready`` (its process id, and the functions that it knows), ``began`` and ``ended`` (an
attempt with a timeout), ``stack`` (an answer), ``report`` (its health and its numbers), ``scheduled`` (a task will run
again later), ``ending`` (it ends), ``replace`` (it will end, and why, with the level of the log), ``left_behind`` (what
a draining child could not run).
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from django_pglock.loggers import WORKER, get_logger

logger = get_logger(WORKER)

#: Bytes that are kept for a side that does not read. Beyond that, messages are dropped: the other side is frozen, and
#: is replaced, or is dead.
MOST_KEPT = 4 * 2**20
_READ_AT_ONCE = 65_536

Message = dict[str, Any]


def new_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop for the main thread of a process: it waits for sockets and timers, and no call may block.

    An error of a call is logged, and the loop continues.
    """
    # Whatever policy the project has set.
    loop = asyncio.SelectorEventLoop()
    loop.set_exception_handler(
        lambda _, about: logger.error("The worker met an error, and continues.", exc_info=about.get("exception"))
    )
    return loop


class Channel:
    """One end of the pair. Any thread may send; one thread receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        end.setblocking(False)
        self._inode = os.fstat(end.fileno()).st_ino
        self._sending = threading.Lock()
        self._unsent = b""
        self._received = b""
        #: The other side has ended, or has closed its end.
        self.is_over = False

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self._socket.fileno()

    def send(self, **message: Any) -> None:
        """Send a message, and what could not be sent before. Does not wait."""
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        with self._sending:
            if len(self._unsent) < MOST_KEPT:
                self._unsent += line
            self._flush()

    def flush(self) -> None:
        """Send what could not be sent before."""
        if self._unsent:
            with self._sending:
                self._flush()

    def _flush(self) -> None:
        # An error other than a full buffer means that the other side has ended. ``receive()`` notices it.
        with suppress(OSError):
            while self._unsent and self.is_own():
                self._unsent = self._unsent[self._socket.send(self._unsent) :]

    def is_own(self) -> bool:
        """Return whether this end is open. A task may have closed all files, and the number may be another file's."""
        try:
            return os.fstat(self._socket.fileno()).st_ino == self._inode
        except OSError:
            return False

    def receive(self) -> Iterator[Message]:
        """Yield the messages that have come. Does not wait. What the caller does not take is kept."""
        try:
            while data := self._socket.recv(_READ_AT_ONCE):
                self._received += data
            self.is_over = True
        except BlockingIOError:
            pass
        except OSError:
            self.is_over = True
        while b"\n" in self._received:
            line, _, self._received = self._received.partition(b"\n")
            yield json.loads(line)

    def close(self) -> None:
        """Close this end. Not while another thread sends: the number may be that of another file a moment later."""
        self.is_over = True
        with self._sending:
            self._socket.close()
