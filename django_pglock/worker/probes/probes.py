"""Everything by which programs outside can see whether a worker lives and works: HTTP, systemd, metrics."""

from __future__ import annotations

import os
import socket
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

from django_pglock.conf import get_settings
from django_pglock.errors import ConfigurationError
from django_pglock.loggers import WORKER, get_logger
from django_pglock.store.outcome import Failed, Succeeded
from django_pglock.worker.in_flight import InFlight
from django_pglock.worker.options import probe_address
from django_pglock.worker.probes.health import Health
from django_pglock.worker.probes.metrics import Metrics, Outcomes, Readings
from django_pglock.worker.service import Service

if TYPE_CHECKING:
    from django_pglock.worker.probes.http_server import ProbeHTTPServer


class Probes:
    """The probes of one worker: it starts and stops them together.

    ``port`` is the port of the HTTP server, perhaps with its address; None: there is none. ``number`` is that of the
    process under its supervisor, None if it has no supervisor. ``outcomes`` is the number of ended claims, by the class
    of the outcome.
    """

    def __init__(
        self,
        health: Health,
        in_flight: InFlight,
        *,
        outcomes: Outcomes,
        readings: Readings,
        port: int | str | None,
        number: int | None,
    ) -> None:
        self.metrics = Metrics(in_flight, outcomes=outcomes, readings=readings, health=health)
        self.systemd = SystemdNotifier(health, in_flight, outcomes=outcomes, is_one_of_several=number is not None)
        self.server: ProbeServer | None = None
        if port is not None:
            host, first = probe_address(port)
            self.server = ProbeServer(health, self.metrics, host=host, port=first, number=number or 1)

    def start(self) -> None:
        """Start to answer. Raises ``ConfigurationError`` if the port is taken."""
        if self.server is not None:
            self.server.start()
        self.systemd.start()

    def leave_to_replacement(self) -> None:
        """Give up the port: it is for the process that replaces this one."""
        if self.server is not None:
            self.server.stop()

    def stop(self) -> None:
        """End in order, after everything else of the worker."""
        self.systemd.stop()
        self.leave_to_replacement()


# The probe server: answers over HTTP whether the worker lives and works, and returns its metrics.
#
# A client cannot disturb the worker: there are few threads, each request has a time limit, and no answer waits. The
# answers contain nothing secret: no arguments, no errors, no addresses.


logger = get_logger(WORKER)

#: Seconds between two checks whether the server has to stop, or has to close a request.
CHECK_INTERVAL = 0.25


class ProbeServer:
    """The HTTP server of one worker, in its own thread.

    ``port`` 0 takes any free port. Process 1 of a supervisor takes ``port``, process 2 the next port, and so on.
    """

    def __init__(self, health: Health, metrics: Metrics, *, host: str, port: int, number: int = 1) -> None:
        self.health = health
        self.metrics = metrics
        self.host = host
        self.port = port + number - 1 if port else port
        self._server: ProbeHTTPServer | None = None

    def start(self) -> None:
        """Listen. Raises ``ConfigurationError`` if that is not possible."""
        # Not imported at module level, to save memory (http_server.py).
        from django_pglock.worker.probes.http_server import ProbeHTTPServer

        try:
            server = ProbeHTTPServer(self.health, self.metrics, self.host, self.port)
        except (OSError, OverflowError) as error:
            raise ConfigurationError(f"Probes cannot be answered at {self.host} port {self.port}: {error}.") from None
        self._server, self.port = server, server.server_address[1]
        threading.Thread(
            target=server.serve_forever, args=(CHECK_INTERVAL,), name="lockworker-probes", daemon=True
        ).start()
        logger.info("Answering probes at %s port %d.", self.host, self.port)

    def stop(self) -> None:
        """Stop listening. Does not wait for requests that are being answered."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()


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
