"""Notifies systemd, by the protocol for services of ``Type=notify``: datagrams with lines of ``NAME=value``."""

from __future__ import annotations

import os
import socket
from collections import Counter
from typing import Any

from django_pglock.conf import get_settings
from django_pglock.loggers import WORKER, get_logger
from django_pglock.store.outcome import Failed, Succeeded
from django_pglock.worker.in_flight import InFlight
from django_pglock.worker.probes.health import Health
from django_pglock.worker.service import Service

logger = get_logger(WORKER)


class SystemdNotifier(Service):
    """Tells systemd the state of the worker: ready, alive, stopping, and a status text. Needs ``NOTIFY_SOCKET``.

    It has its own thread, because the heartbeat waits for the database, and systemd must not end a worker whose
    database cannot be reached. It reports the worker as alive while no part of the worker hangs, the heartbeat
    included. ``outcomes``: the number of ended claims by class of outcome.
    """

    name = "notifier"

    def __init__(
        self, health: Health, in_flight: InFlight, *, outcomes: Counter[type[Any] | None], is_one_of_several: bool
    ) -> None:
        super().__init__()
        self.health = health
        self.in_flight = in_flight
        self.outcomes = outcomes
        self.is_one_of_several = is_one_of_several
        self.address = os.environ.get("NOTIFY_SOCKET", "")
        #: Seconds within which systemd expects a message; None: systemd expects no messages.
        self.limit = watchdog_limit(is_one_of_several=is_one_of_several)
        self._has_failed = False

    def start(self) -> None:
        """Start the thread if there is a socket to send to."""
        if self.address:
            super().start()

    def run_once(self) -> None:
        """Send the status. The interval is short enough that one message may be lost."""
        lines = [f"STATUS={self._status()}"]
        if self.limit is not None and self.health.hung() is None:
            lines.append("WATCHDOG=1")
        self.say(*lines)
        self.stopping.wait(get_settings().HEARTBEAT_INTERVAL if self.limit is None else self.limit / 3)

    def tell_ready(self) -> None:
        """Tell systemd that the worker has started."""
        self.say("READY=1", f"STATUS={self._status()}")

    def tell_stopping(self) -> None:
        """Tell systemd that the worker stops. One process of several does not: the service continues without it."""
        if not self.is_one_of_several:
            self.say("STOPPING=1", f"STATUS={self._status()}")

    def _status(self) -> str:
        done, failed = self.outcomes[Succeeded], self.outcomes[Failed]
        work = f"{self.in_flight.running} tasks running, {done} succeeded, {failed} failed"
        return self.health.hung() or self.health.unready() or work

    def say(self, *lines: str) -> None:
        """Send one message. Does not wait. The first failure is logged, and none is raised."""
        if not self.address:
            return
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


def watchdog_limit(*, is_one_of_several: bool) -> float | None:
    """Return the seconds of ``WatchdogSec=``; None if it is not set, or is for another process.

    It is for the main process of the service. If that is a supervisor, its processes may send the messages.
    """
    text = os.environ.get("WATCHDOG_USEC", "")
    is_ours = is_one_of_several or os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    return int(text) / 1e6 if is_ours and text.isdigit() and int(text) else None
