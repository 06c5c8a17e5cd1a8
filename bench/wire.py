"""A proxy between a client and PostgreSQL that counts round trips.

The server ends its answer to each message, or pipeline of messages, with ReadyForQuery ("Z"). As many as there were,
so often did the client wait for the network.
https://www.postgresql.org/docs/current/protocol-message-formats.html
"""

from __future__ import annotations

import contextlib
import socket
import struct
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path


class Wire:
    """Listens on a Unix socket in a folder of its own and passes everything on to the server's."""

    def __init__(self, server: str | Path, port: int = 5432) -> None:
        self.round_trips = 0
        self._server = str(Path(server) / f".s.PGSQL.{port}")
        self._folder = tempfile.TemporaryDirectory(prefix="wire-")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{self._folder.name}/.s.PGSQL.{port}")
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def host(self) -> str:
        """What a client has to be told as the host."""
        return self._folder.name

    @contextlib.contextmanager
    def counting(self) -> Iterator[list[int]]:
        """Count the round trips of a block; the list has their number at its end."""
        before, counted = self.round_trips, [0]
        yield counted
        counted[0] = self.round_trips - before

    def close(self) -> None:
        """Take no more clients."""
        self._listener.close()
        self._folder.cleanup()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            server.connect(self._server)
            threading.Thread(target=_pass_on, args=(client, server), daemon=True).start()
            threading.Thread(target=self._pass_back, args=(server, client), daemon=True).start()

    def _pass_back(self, server: socket.socket, client: socket.socket) -> None:
        left = b""
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                left = self._count(left + data)
                client.sendall(data)
            client.shutdown(socket.SHUT_RDWR)

    def _count(self, data: bytes) -> bytes:
        """Count the answers that are complete; return what is left for the next time."""
        while len(data) >= 5:
            length = 1 + struct.unpack("!I", data[1:5])[0]
            if len(data) < length:
                break
            self.round_trips += data[:1] == b"Z"
            data = data[length:]
        return data


def _pass_on(client: socket.socket, server: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := client.recv(65536):
            server.sendall(data)
        server.shutdown(socket.SHUT_RDWR)
