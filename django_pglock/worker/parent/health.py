"""The health of a worker, and its numbers: only what its parts have told, so no answer waits. And the messages to
systemd, which say the same.
"""

from __future__ import annotations

import os
import socket
import time
from asyncio import AbstractEventLoop
from collections import Counter
from collections.abc import Sequence

from django_pglock.conf import get_settings
from django_pglock.loggers import WORKER, get_logger
from django_pglock.store.liveness import silent_after
from django_pglock.worker.parent.crew import Crew
from django_pglock.worker.parent.heartbeat import MigrationsPending

logger = get_logger(WORKER)

#: The numbers of the report of a child.
OF_NOW = ("in_flight", "running", "unsettled")
#: Seconds between two messages to systemd while the worker is not ready.
CHECK_INTERVAL = 0.25


class Health:
    """Answers two questions: does the worker live, and does it work? An answer is a sentence about a problem, or None.

    A worker without a database connection does not work, but a restart would not help. For any thread.
    """

    def __init__(self, crews: Sequence[Crew]) -> None:
        self.crews = crews
        self.is_stopping = False

    def hung(self) -> str | None:
        """Return why the parent does not work any more. What hangs in a child is no reason: the child is replaced."""
        silence = max((time.monotonic() - crew.checked_at for crew in self.crews), default=0.0)
        if silence > get_settings().HEARTBEAT_LIMIT:
            return f"The worker has not responded for {silence:.0f} s."
        return None

    def unready(self) -> str | None:
        """Return why no child claims tasks."""
        if self.is_stopping:
            return "The worker is stopping."
        return next(filter(None, map(_unready, self.crews)), None) or self.hung()

    def beat_age(self) -> float | None:
        """Return the seconds since the oldest of the last heartbeats was written; None before the first one."""
        dates = [crew.heartbeat.beat_at for crew in self.crews]
        return None if None in dates else time.monotonic() - min(date for date in dates if date is not None)

    @property
    def now(self) -> Counter[str]:
        """What all children do at the moment."""
        now: Counter[str] = Counter()
        for crew in self.crews:
            for child in list(crew.all):
                now.update({name: child.report.get(name, 0) for name in OF_NOW})
                now.update({"processes": 1, "threads": crew.options["threads"]})
        return now


def _unready(crew: Crew) -> str | None:
    heartbeat = crew.heartbeat
    if isinstance(heartbeat.last_error, MigrationsPending):
        return "Migrations of django_pglock are pending."
    if not heartbeat.is_connected:
        return "The worker has no connection to the database."
    if heartbeat.beat_at is None:
        return "The first heartbeat is not written yet."
    age = time.monotonic() - heartbeat.beat_at
    if age > silent_after():
        return f"The last heartbeat was written {age:.0f} s ago."
    troubles = [child.report.get("unready", "A process of the worker starts.") for child in list(crew.all)]
    if not troubles:
        return "No process of the worker runs at the moment."
    return None if None in troubles else str(troubles[0])


class SystemdNotifier:
    """Tells systemd the state of the worker: ready, alive, stopping, and a status text. Needs ``NOTIFY_SOCKET``.

    The loop sends the messages. So they stop if the loop hangs, and do not if the database cannot be reached.
    """

    def __init__(self, loop: AbstractEventLoop, health: Health) -> None:
        self.loop = loop
        self.health = health
        self.address = os.environ.get("NOTIFY_SOCKET", "")
        #: Seconds within which systemd expects a message; None: systemd expects no messages.
        self.limit = watchdog_limit()
        self._has_failed = False

    def start(self) -> None:
        """Send the state now, and from time to time. The interval is so short that one message may be lost."""
        if self.address:
            self.tell()
            often = get_settings().HEARTBEAT_INTERVAL if self.limit is None else self.limit / 3
            self.loop.call_later(min(often, CHECK_INTERVAL) if self.health.unready() else often, self.start)

    def tell(self) -> None:
        """Send the state."""
        if not self.address:
            return
        unready = self.health.unready()
        state = ["STOPPING=1"] if self.health.is_stopping else ["READY=1"] if unready is None else []
        watchdog = [] if self.limit is None else ["WATCHDOG=1"]
        self._say(f"STATUS={unready or str(self.health.now['running']) + ' tasks running'}", *state, *watchdog)

    def _say(self, *lines: str) -> None:
        """Send one message. Does not wait. The first failure is logged, and none is raised."""
        # "@" stands for the NUL byte at the start of the name of an abstract socket.
        address = f"\0{self.address[1:]}" if self.address[0] == "@" else self.address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
                channel.setblocking(False)
                channel.sendto("\n".join(lines).encode(), address)
        except OSError as error:
            if not self._has_failed:
                self._has_failed = True
                logger.warning("Messages to NOTIFY_SOCKET cannot be sent: %s", error)


def watchdog_limit() -> float | None:
    """Return the seconds of ``WatchdogSec=``; None if it is not set, or is for another process."""
    text = os.environ.get("WATCHDOG_USEC", "")
    is_ours = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    return int(text) / 1e6 if is_ours and text.isdigit() and int(text) else None
