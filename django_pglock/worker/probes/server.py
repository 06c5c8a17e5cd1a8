"""The probe server: answers over HTTP whether the worker lives and works, and returns its metrics.

A client cannot disturb the worker: there are few threads, each request has a time limit, and no answer waits. The
answers contain nothing secret: no arguments, no errors, no addresses.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from django_pglock.errors import ConfigurationError
from django_pglock.loggers import WORKER, get_logger
from django_pglock.worker.probes.health import Health
from django_pglock.worker.probes.metrics import Metrics

if TYPE_CHECKING:
    from django_pglock.worker.probes.http_server import ProbeHTTPServer

logger = get_logger(WORKER)

#: All addresses, because kubelet and Prometheus send requests from outside of the pod. There is no server without a
#: port.
DEFAULT_HOST = "0.0.0.0"  # noqa: S104
#: Seconds between two checks whether the server has to stop, or has to close a request.
CHECK_INTERVAL = 0.25


class ProbeServer:
    """The HTTP server of one worker, in its own thread.

    ``port`` 0 takes any free port. Process 1 of a supervisor takes ``port``, process 2 the next port, and so on.
    """

    def __init__(self, health: Health, metrics: Metrics, *, host: str | None, port: int, number: int = 1) -> None:
        self.health = health
        self.metrics = metrics
        self.host = DEFAULT_HOST if host is None else host
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
