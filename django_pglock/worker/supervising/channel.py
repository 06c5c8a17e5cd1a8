"""The channel between the supervisor and one of its processes: a pair of sockets, one of which is the process's stdin.

Each side notices the death of the other, on each system and for each cause, because the kernel closes the files of a
dead process. Messages are single bytes. Unlike signals, other programs cannot send them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import NamedTuple

from django_pglock.conf import get_settings
from django_pglock.postgres.forking import keep_from_children
from django_pglock.worker.service import Service, logger

#: The environment variable with the number of a process. It is set only in processes of a supervisor.
NUMBER = "DJANGO_PGLOCK_PROCESS"
#: The environment variable with the descriptor of the socket to a shared heartbeat, if there is one. The name must not
#: change, because a supervisor with another version of the package may have started this process.
HEARTBEAT_FD = "DJANGO_PGLOCK_HEARTBEAT_LINE"
#: Messages of a process: it is alive; it asks for its replacement; it ends, within its grace period.
ALIVE, REPLACE, ENDING = b".", b"r", b"e"
#: The message of the supervisor: give back all tasks, and end.
STOP_NOW = b"h"
#: The exit code of a process with ``--drain`` that leaves tasks behind: EX_TEMPFAIL of sysexits.h, try again later.
LEFT_BEHIND = 75


class SupervisorSockets(NamedTuple):
    """What leads a process to the supervisor that has started it."""

    #: The number of the process, from 1.
    number: int
    channel: socket.socket
    #: To the heartbeat that the supervisor shares among its processes; None: each beats by itself.
    heartbeat: socket.socket | None = None


class SupervisorChannel(Service):
    """The process's end of the channel.

    ``on_supervisor_gone`` is called when the supervisor has died, ``on_stop_now`` when the process must end at once.
    """

    name = "supervisor channel"

    def __init__(
        self, channel: socket.socket, *, on_supervisor_gone: Callable[[], None], on_stop_now: Callable[[], None]
    ) -> None:
        super().__init__()
        self.on_supervisor_gone = on_supervisor_gone
        self.on_stop_now = on_stop_now
        self._channel = channel
        keep_from_children(channel)
        channel.settimeout(get_settings().HEARTBEAT_INTERVAL)

    def start(self) -> None:
        self.tell(ALIVE)
        super().start()

    def run_once(self) -> None:
        try:
            message = self._channel.recv(1)
        except TimeoutError:
            self.tell(ALIVE)
        except ConnectionError:
            self._end()
        else:
            self.on_stop_now() if message == STOP_NOW else self._end()

    def tell(self, message: bytes) -> None:
        """Send a message to the supervisor. Thread-safe. If the supervisor has died, ``run_once()`` notices it."""
        with contextlib.suppress(OSError):
            self._channel.send(message)

    def _end(self) -> None:
        logger.warning("The supervisor of this worker has ended. The worker ends as after SIGTERM.")
        self.stopping.set()
        self.on_supervisor_gone()


def to_supervisor() -> SupervisorSockets | None:
    """Return the sockets to the supervisor of this process. None: there is none, or this is a second call."""
    number = os.environ.pop(NUMBER, None)
    if number is None:
        return None
    # Processes that tasks start must get an empty stdin, as under a service manager, and not the channel.
    channel = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return SupervisorSockets(int(number), channel, _heartbeat_socket())


def _heartbeat_socket() -> socket.socket | None:
    descriptor = os.environ.pop(HEARTBEAT_FD, None)
    if descriptor is None:
        return None
    # A copy, because processes that tasks start do not inherit it.
    end = socket.socket(fileno=os.dup(int(descriptor)))
    os.close(int(descriptor))
    return end


#: SIGHUP comes when a terminal or an ssh session is closed. Windows has no such signal.
HANG_UP: int | None = getattr(signal, "SIGHUP", None)


def stop_signals() -> list[int]:
    """Return the signals that stop a worker in this process. ``nohup`` has SIGHUP ignored, and that stays so."""
    is_heard = HANG_UP is not None and signal.getsignal(HANG_UP) is not signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *([HANG_UP] if HANG_UP is not None and is_heard else [])]


class SignalSafeEvent:
    """The part of ``threading.Event`` that a signal handler may use, even while its own thread waits for or sets it.

    A signal handler runs in the middle of other code of the same thread. ``threading.Event`` would then take its lock
    twice in one thread, which is a deadlock. ``SimpleQueue`` is safe there.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._wakeup: SimpleQueue[None] = SimpleQueue()

    def set(self) -> None:
        """Set the event and wake the thread that waits for it."""
        self._is_set = True
        self._wakeup.put(None)

    def is_set(self) -> bool:
        """Return whether the event has been set."""
        return self._is_set

    def wait(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds until the event is set. Return whether it is set."""
        if not self._is_set:
            with suppress(Empty):
                # Put the item back, because other threads may wait, too.
                self._wakeup.put(self._wakeup.get(timeout=timeout))
        return self._is_set
