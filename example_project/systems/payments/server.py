"""``python -m example_project.systems.payments.server PORT``: a payment provider on loopback.

It stands for the service of another company: it has its own storage, which a rollback of the shop does not change.
``POST /charges`` and ``POST /refunds`` with an ``Idempotency-Key`` have their effect once for each key. ``GET /book``
shows each effect, and how often it was requested. After ``POST /hold`` the effects continue, but no answer is sent
until ``POST /release``. So a client can be killed between the charge and the answer.
"""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Book:
    """What the provider has done, by the key of each request."""

    def __init__(self) -> None:
        self.entries: dict[str, dict[str, Any]] = {}
        self.may_answer = threading.Event()
        self.may_answer.set()
        self._guard = threading.Lock()

    def enter(self, kind: str, key: str, content: dict[str, Any]) -> dict[str, Any] | None:
        """Do what is asked, unless it was done for this key; return the entry, or None if it is another request."""
        with self._guard:
            number = len(self.entries) + 1
            new = {"id": f"{kind}-{number}", "kind": kind, "key": key, "content": content, "requests": 0}
            entry = self.entries.setdefault(key, new)
            if (entry["kind"], entry["content"]) != (kind, content):
                return None
            entry["requests"] += 1
            return entry


class Handler(BaseHTTPRequestHandler):
    """One request."""

    book = Book()

    def do_GET(self) -> None:
        """Show the book."""
        self._answer(200, list(self.book.entries.values()))

    def do_POST(self) -> None:
        """Charge, refund, hold or release."""
        name = self.path.strip("/")
        if name in ("hold", "release"):
            getattr(self.book.may_answer, "clear" if name == "hold" else "set")()
            self._answer(200, None)
            return
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        entry = self.book.enter(name.rstrip("s"), self.headers["Idempotency-Key"], content)
        self.book.may_answer.wait()
        self._answer(200 if entry else 422, entry)

    def _answer(self, status: int, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name of the standard library
        """Write no log."""


class Server(ThreadingHTTPServer):
    """A thread for each request, and a queue for many connections at the same moment."""

    request_queue_size = 256
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that was killed before its answer."""


if __name__ == "__main__":
    Server(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
