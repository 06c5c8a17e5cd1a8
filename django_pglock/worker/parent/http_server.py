"""The HTTP server of the probes, and its answers.

This is a separate module, because most workers answer no probes, and need no memory for an HTTP server.
"""

from __future__ import annotations

import contextlib
import socket
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from operator import itemgetter
from socketserver import ThreadingTCPServer
from typing import Any
from urllib.parse import urlsplit

from django_pglock.loggers import WORKER, get_logger
from django_pglock.worker.parent.health import Health
from django_pglock.worker.parent.metrics import CONTENT_TYPE, Metrics

logger = get_logger(WORKER)

#: The largest number of requests that are open at once, and the seconds after which a request is closed.
MOST_REQUESTS, LONGEST_REQUEST = 16, 5.0
PLAIN = "text/plain; charset=utf-8"


class ProbeHTTPServer(ThreadingTCPServer):
    """An HTTP server. Not that of http.server, which queries the DNS for its name when it starts."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 2 * MOST_REQUESTS

    def __init__(self, health: Health, metrics: Metrics, host: str, port: int) -> None:
        self.health = health
        self.metrics = metrics
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # When each request began.
        self._requests: dict[Any, float] = {}
        super().__init__((host, port), Handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Close the oldest request if there are too many. It waits for its client, because an answer takes no time.

        If the new one were refused instead, clients that send nothing would make a living worker look dead.
        """
        while len(self._requests) >= MOST_REQUESTS:
            # A copy, because the threads of requests remove these.
            self._close(min(list(self._requests.items()), key=itemgetter(1))[0])
        return True

    def process_request(self, request: Any, client_address: Any) -> None:
        self._requests[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._requests.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Close requests that take too long, even if the client still sends data. Their threads then end."""
        for request, began in list(self._requests.items()):
            if time.monotonic() - began > LONGEST_REQUEST:
                self._close(request)

    def _close(self, request: Any) -> None:
        self._requests.pop(request, None)
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("A probe was not answered.", exc_info=True)


class Handler(BaseHTTPRequestHandler):
    """One request."""

    timeout = LONGEST_REQUEST
    server: ProbeHTTPServer

    def do_GET(self) -> None:
        """Answer with header and body."""
        self._answer(has_body=True)

    def do_HEAD(self) -> None:
        """Answer with only the header."""
        self._answer(has_body=False)

    def _answer(self, *, has_body: bool) -> None:
        status, kind, text = self._response()
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if has_body:
            self.wfile.write(body)

    def _response(self) -> tuple[HTTPStatus, str, str]:
        match urlsplit(self.path).path:
            case "/livez":
                return _verdict(self.server.health.hung())
            case "/readyz":
                return _verdict(self.server.health.unready())
            case "/metrics":
                return HTTPStatus.OK, CONTENT_TYPE, self.server.metrics.exposition()
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
