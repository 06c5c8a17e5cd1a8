"""A client that sends a request without waiting for its answer, and may disconnect at any moment."""

from __future__ import annotations

import http.client
import select
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

#: Seconds until a server that does not answer counts as broken.
TIMEOUT = 120.0
# Close with a reset: the server notices it at its next read or write.
RESET = struct.pack("ii", 1, 0)


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes


class Click:
    """One request, sent over a connection of its own. ``body_missing`` is what it promises and never sends."""

    def __init__(
        self,
        port: int,
        path: str,
        *,
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
        body_missing: int = 0,
    ) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
        self._response: http.client.HTTPResponse | None = None
        self._socket = _connect(port)
        # http.client closes the socket that it knows when the answer has begun.
        self._connection.sock = self._socket.dup()
        sent = {"Connection": "close", **(headers or {})}
        if body_missing:
            sent["Content-Length"] = str(body_missing)
        try:
            self._connection.request(method, path, headers=sent)
        except OSError:
            self.close()
            raise

    @property
    def is_open(self) -> bool:
        return self._socket.fileno() >= 0

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def status(self) -> int:
        """The status of the answer, as soon as its headers have come."""
        return self._begun().status

    def answer(self) -> Answer:
        """Read the whole answer and end the connection, for which some servers wait."""
        answer = self.read()
        self.close()
        return answer

    def read(self) -> Answer:
        """Read the whole answer."""
        response = self._begun()
        return Answer(response.status, dict(response.headers), response.read())

    def vanish(self) -> None:
        """Break the connection off."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self.close()

    def close(self) -> None:
        """End the connection. May come twice."""
        if self._response is not None:
            self._response.close()
        self._connection.close()
        self._socket.close()

    def _begun(self) -> http.client.HTTPResponse:
        if self._response is None:
            self._response = self._connection.getresponse()
        return self._response


def _connect(port: int) -> socket.socket:
    connection = socket.socket()
    # A small buffer, so that a server soon notices a client that does not read. Less than a packet would be slow.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * 65536)
    connection.settimeout(TIMEOUT)
    try:
        connection.connect(("127.0.0.1", port))
    except OSError:
        connection.close()
        raise
    return connection


def answered(clicks: Sequence[Click], seconds: float) -> list[Click]:
    """Wait for the begin of an answer; return the requests with one, or an empty list after the time limit."""
    ready, _, _ = select.select(clicks, [], [], seconds)
    return ready
