"""Answers to probes over HTTP: does the worker live, does it work, and how much.

It must stay out of the worker's way whoever asks: threads are few, a request has a time in which it has to be over, and
no answer waits for anything. It tells nothing that is secret: no arguments, no errors, no addresses.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from django_pglock.errors import ConfigurationError
from django_pglock.postgres.forking import keep_from_children
from django_pglock.worker.probes.metrics import CONTENT_TYPE, exposition

if TYPE_CHECKING:
    from django_pglock.worker.worker import Worker

logger = logging.getLogger("django_pglock.worker")

#: kubelet and Prometheus come from outside of the pod. Nothing listens unless a port is asked for.
DEFAULT_HOST = "0.0.0.0"  # noqa: S104
#: Requests that are answered at once at most, and seconds after which one is cut off.
MOST_REQUESTS, LONGEST_REQUEST = 16, 5.0
#: Seconds between two looks of the server whether it is to stop, or a request to be cut off.
BETWEEN_LOOKS = 0.25
PLAIN = "text/plain; charset=utf-8"


class Probes:
    """The HTTP server of one worker, in a thread of its own.

    ``port`` 0 takes any that is free. The processes of a supervisor take ``port``, the next one, and so on.
    """

    def __init__(self, worker: Worker, *, host: str | None, port: int) -> None:
        self.worker = worker
        self.host = DEFAULT_HOST if host is None else host
        self.port = port + worker.line.number - 1 if port and worker.line is not None else port
        self._server: Server | None = None

    def start(self) -> None:
        """Listen. Raises ``ConfigurationError`` where that is not possible."""
        try:
            server = Server(self.worker, self.host, self.port)
        except (OSError, OverflowError) as error:
            raise ConfigurationError(f"Probes cannot be answered at {self.host} port {self.port}: {error}.") from None
        self._server, self.port = server, server.server_address[1]
        threading.Thread(
            target=server.serve_forever, args=(BETWEEN_LOOKS,), name="lockworker-probes", daemon=True
        ).start()
        logger.info("Answering probes at %s port %d.", self.host, self.port)

    def stop(self) -> None:
        """Stop listening; what is being answered is not waited for."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()


class Server(ThreadingTCPServer):
    """Not http.server's own, which asks the DNS for its name when it starts."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 2 * MOST_REQUESTS

    def __init__(self, worker: Worker, host: str, port: int) -> None:
        self.worker = worker
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # When each request began.
        self._requests: dict[Any, float] = {}
        super().__init__((host, port), Handler)
        keep_from_children(self)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Turn away who comes while too many are being answered."""
        return len(self._requests) < MOST_REQUESTS

    def process_request(self, request: Any, client_address: Any) -> None:
        self._requests[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._requests.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Cut off who takes too long, however slowly something comes: the request's thread then ends."""
        for request, began in list(self._requests.items()):
            if time.monotonic() - began > LONGEST_REQUEST:
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("A probe was not answered.", exc_info=True)


class Handler(BaseHTTPRequestHandler):
    """One request."""

    timeout = LONGEST_REQUEST
    server: Server

    def do_GET(self) -> None:
        """Answer with all of it."""
        self._answer(has_body=True)

    def do_HEAD(self) -> None:
        """Answer without the body."""
        self._answer(has_body=False)

    def _answer(self, *, has_body: bool) -> None:
        status, kind, text = self._look()
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if has_body:
            self.wfile.write(body)

    def _look(self) -> tuple[HTTPStatus, str, str]:
        health = self.server.worker.health
        match urlsplit(self.path).path:
            case "/livez":
                return _verdict(health.stuck())
            case "/readyz":
                return _verdict(health.unready())
            case "/metrics":
                return HTTPStatus.OK, CONTENT_TYPE, exposition(self.server.worker)
            case _:
                return HTTPStatus.NOT_FOUND, PLAIN, "There are /livez, /readyz and /metrics.\n"

    def version_string(self) -> str:
        """Name no versions."""
        return "django_pglock"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - named by the library
        logger.debug("Probe: " + format, *args)


def _verdict(trouble: str | None) -> tuple[HTTPStatus, str, str]:
    if trouble is None:
        return HTTPStatus.OK, PLAIN, "ok\n"
    return HTTPStatus.SERVICE_UNAVAILABLE, PLAIN, f"{trouble}\n"
