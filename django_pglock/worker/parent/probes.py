"""The probes: tell orchestrators and service managers over HTTP and to systemd whether the worker lives and works.

A client cannot disturb the worker: the HTTP server has threads of its own, each request has a time limit, and no answer
waits. The answers contain nothing secret: no arguments, no errors, no addresses.
"""

from __future__ import annotations

import os
import socket
import threading
from typing import TYPE_CHECKING

from django_pglock.conf import get_settings
from django_pglock.errors import ConfigurationError
from django_pglock.loggers import WORKER, get_logger
from django_pglock.worker.loop import Loop
from django_pglock.worker.options import probe_address
from django_pglock.worker.parent.health import Health

if TYPE_CHECKING:
    from django_pglock.worker.parent.http_server import ProbeHTTPServer

logger = get_logger(WORKER)

#: Seconds between two checks of the HTTP server whether it has to stop, or has to close a request.
CHECK_INTERVAL = 0.25


class ProbeServer:
    """The HTTP server of the probes, in its own thread. ``port`` 0 takes any free port."""

    def __init__(self, health: Health, given: int | str) -> None:
        self.health = health
        self.host, self.port = probe_address(given)
        self._server: ProbeHTTPServer | None = None

    def start(self) -> None:
        """Listen. Raises ``ConfigurationError`` if that is not possible."""
        # Not imported at module level: most workers answer no probes, and need no memory for an HTTP server.
        from django_pglock.worker.parent.http_server import ProbeHTTPServer
        from django_pglock.worker.parent.metrics import Metrics

        try:
            server = ProbeHTTPServer(self.health, Metrics(self.health), self.host, self.port)
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


class SystemdNotifier:
    """Tells systemd the state of the worker: ready, alive, stopping, and a status text. Needs ``NOTIFY_SOCKET``.

    The loop sends the messages. So they stop if the loop hangs, and do not if the database cannot be reached.
    """

    def __init__(self, loop: Loop, health: Health) -> None:
        self.loop = loop
        self.health = health
        self.address = os.environ.get("NOTIFY_SOCKET", "")
        #: Seconds within which systemd expects a message; None: systemd expects no messages.
        self.limit = watchdog_limit()
        self._is_ready = self._has_failed = False

    def start(self) -> None:
        """Send the status now, and from time to time. The interval is so short that one message may be lost."""
        if not self.address:
            return
        lines = [f"STATUS={self._status()}"]
        if not self._is_ready and self.health.unready() is None:
            self._is_ready = True
            lines.append("READY=1")
        if self.limit is not None:
            lines.append("WATCHDOG=1")
        self.say(*lines)
        often = get_settings().HEARTBEAT_INTERVAL if self.limit is None else self.limit / 3
        self.loop.call_later(often if self._is_ready else min(often, CHECK_INTERVAL), self.start)

    def tell_stopping(self) -> None:
        """Tell systemd that the worker stops."""
        self.say("STOPPING=1", f"STATUS={self._status()}")

    def _status(self) -> str:
        counted = self.health.counted
        work = (
            f"{self.health.now['running']} tasks running, {counted['Succeeded']} succeeded, {counted['Failed']} failed"
        )
        return self.health.unready() or work

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


def watchdog_limit() -> float | None:
    """Return the seconds of ``WatchdogSec=``; None if it is not set, or is for another process."""
    text = os.environ.get("WATCHDOG_USEC", "")
    is_ours = os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    return int(text) / 1e6 if is_ours and text.isdigit() and int(text) else None
