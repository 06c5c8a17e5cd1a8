"""The probe server: answers over HTTP whether the worker lives and works, and its metrics.

No client may disturb the worker: threads are few, each request has a time limit, and no answer
waits for anything. It tells nothing that is secret: no arguments, no errors, no addresses.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from django_pglock.errors import ConfigurationError
from django_pglock.worker.probes.health import Health
from django_pglock.worker.probes.metrics import Metrics

if TYPE_CHECKING:
    from django_pglock.worker.probes.http_server import ProbeHTTPServer

logger = logging.getLogger("django_pglock.worker")

#: kubelet and Prometheus send requests from outside of the pod. Nothing listens unless a port is given.
DEFAULT_HOST = "0.0.0.0"  # noqa: S104
#: Seconds between two checks whether the server has to stop, or a request has to be cut off.
CHECK_INTERVAL = 0.25


class ProbeServer:
    """The HTTP server of one worker, in a thread of its own.

    ``port`` 0 takes any free port. The processes of a supervisor, by their ``number`` from 1, take ``port``, the next
    one, and so on.
    """

    def __init__(self, health: Health, metrics: Metrics, *, host: str | None, port: int, number: int = 1) -> None:
        self.health = health
        self.metrics = metrics
        self.host = DEFAULT_HOST if host is None else host
        self.port = port + number - 1 if port else port
        self._server: ProbeHTTPServer | None = None

    def start(self) -> None:
        """Listen. Raises ``ConfigurationError`` where that is not possible."""
        # Not at module level: http_server.py says why.
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
        """Stop listening; what is being answered is not waited for."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
