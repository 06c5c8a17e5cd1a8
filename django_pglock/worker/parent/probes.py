"""The probes: tell orchestrators over HTTP whether the worker lives and works, and its metrics.

Each request has a thread of its own and a time limit, and only the metrics of the tasks in the database need the
database. The answers contain nothing secret: no arguments, no errors, no addresses. Most workers answer no probes, and
need no memory for an HTTP server, so they do not import this module.
"""

from __future__ import annotations

import socket
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any
from urllib.parse import urlsplit

from django_pglock.errors import ConfigurationError
from django_pglock.loggers import WORKER, get_logger
from django_pglock.worker.options import probe_address
from django_pglock.worker.parent.health import Health
from django_pglock.worker.parent.metrics import CONTENT_TYPE, exposition

logger = get_logger(WORKER)

#: Seconds for which a request may wait for its client.
LONGEST_WAIT = 5.0
PLAIN = "text/plain; charset=utf-8"


class ProbeServer(ThreadingTCPServer):
    """An HTTP server. Not that of http.server, which queries the DNS for its name when it starts.

    It listens at ``port`` or ``"ADDRESS:PORT"``; port 0 takes any free one. Raises ``ConfigurationError`` if that is
    not possible.
    """

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 32

    def __init__(self, health: Health, given: int | str) -> None:
        self.health = health
        host, port = probe_address(given)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), Handler)
        except (OSError, OverflowError) as error:
            raise ConfigurationError(f"Probes cannot be answered at {host} port {port}: {error}.") from None
        self.port: int = self.server_address[1]
        logger.info("Answering probes at %s port %d.", host, self.port)

    def start(self) -> None:
        """Answer in a thread."""
        threading.Thread(target=self.serve_forever, args=(0.25,), name="lockworker-probes", daemon=True).start()

    def stop(self) -> None:
        """Stop listening. Does not wait for requests that are being answered."""
        self.shutdown()
        self.server_close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("A probe was not answered.", exc_info=True)


class Handler(BaseHTTPRequestHandler):
    """One request."""

    timeout = LONGEST_WAIT
    server: ProbeServer

    def do_GET(self) -> None:
        """Answer with header and body."""
        status, kind, text = self._response()
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815 - named by the library

    def _response(self) -> tuple[HTTPStatus, str, str]:
        match urlsplit(self.path).path:
            case "/livez":
                return _verdict(self.server.health.hung())
            case "/readyz":
                return _verdict(self.server.health.unready())
            case "/metrics":
                return HTTPStatus.OK, CONTENT_TYPE, exposition(self.server.health)
            case _:
                return HTTPStatus.NOT_FOUND, PLAIN, "There are /livez, /readyz and /metrics.\n"

    def version_string(self) -> str:
        """Return a name without versions."""
        return "django_pglock"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - named by the library
        logger.debug("Probe: " + format, *args)


def _verdict(trouble: str | None) -> tuple[HTTPStatus, str, str]:
    if trouble is None:
        return HTTPStatus.OK, PLAIN, "ok\n"
    return HTTPStatus.SERVICE_UNAVAILABLE, PLAIN, f"{trouble}\n"
