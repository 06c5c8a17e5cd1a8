"""The line between a supervisor and one of its processes: a pair of sockets, of which the process has one as its stdin.

It tells both sides of the other's death, on every system and however it came: the kernel closes what the dead had open.
And what is said on it, a byte at a time, cannot be confused with signals that others send.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable

from django_pglock.conf import get_settings
from django_pglock.postgres.forking import keep_from_children
from django_pglock.worker.service import Service, logger

#: The environment variable that tells a process that it has a supervisor, and which of its processes it is.
NUMBER = "DJANGO_PGLOCK_PROCESS"
#: What a process says: that it lives; that another may begin in its place; that it ends, within its grace.
ALIVE, REPLACE, ENDING = b".", b"r", b"e"
#: What the supervisor says: give back everything and end.
HURRY = b"h"


class Line(Service):
    """The process's end. ``cut`` is called when the supervisor is gone, ``hurry`` when it wants the end at once."""

    name = "line"

    def __init__(self, number: int, line: socket.socket) -> None:
        super().__init__()
        self.number = number
        self.cut: Callable[[], None] = lambda: None
        self.hurry: Callable[[], None] = lambda: None
        self._line = line
        keep_from_children(line)
        line.settimeout(get_settings().HEARTBEAT_INTERVAL)

    def start(self) -> None:
        self.tell(ALIVE)
        super().start()

    def turn(self) -> None:
        try:
            heard = self._line.recv(1)
        except TimeoutError:
            self.tell(ALIVE)
        except ConnectionError:
            self._end()
        else:
            self.hurry() if heard == HURRY else self._end()

    def tell(self, word: bytes) -> None:
        """Say something to the supervisor. From any thread; if nobody hears it, that is noticed elsewhere."""
        with contextlib.suppress(OSError):
            self._line.send(word)

    def _end(self) -> None:
        logger.warning("The supervisor of this worker is gone; the worker ends as after SIGTERM.")
        self.stopping.set()
        self.cut()


def to_supervisor() -> Line | None:
    """Return the line to the supervisor that has started this process, if one has. Asked a second time, it has not."""
    number = os.environ.pop(NUMBER, None)
    if number is None:
        return None
    # What tasks start must find an empty stdin, as under a service manager, and not our line.
    line = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return Line(int(number), line)
