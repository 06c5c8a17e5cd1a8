"""A TCP proxy before a PostgreSQL server, for tests: a network that can be cut, slow or silent.

Its kernel still acknowledges what nobody reads any more, as load balancers do. So neither keepalives nor
``tcp_user_timeout`` notice a mute connection, only a time limit of the client does.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from typing import Any
from urllib.parse import quote

CHUNK = 65536
# Close with a reset: both sides notice at once that the connection is closed.
RESET = struct.pack("ii", 1, 0)


class Proxy:
    """``127.0.0.1:port`` to a server, given as host and port, or as the folder of its Unix socket. A context manager.

    Any thread may change at any time how it behaves; what is open follows at once.
    """

    def __init__(self, host: str, port: int | str = 5432) -> None:
        self.host = host
        self.server_port = int(port or 5432)
        self.port = 0
        self._listener: socket.socket | None = None
        self._links: list[_Link] = []
        self._lock = threading.Lock()
        self._delay = 0.0
        self._is_mute = self._refuses = False

    @classmethod
    def before(cls, connection: Any) -> Proxy:
        """Make a proxy before the server that a Django connection is connected to."""
        connection.ensure_connection()
        info = connection.connection.info
        return cls(info.host, info.port)

    def url(self, database: str, user: str = "postgres") -> str:
        """Return the DATABASE_URL of a database behind the proxy, for servers that ask for no password."""
        return f"postgres://{quote(user)}@127.0.0.1:{self.port}/{database}"

    def __enter__(self) -> Proxy:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> Proxy:
        """Begin to take connections, at a free port the first time and at the same one again."""
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listener,), name="proxy", daemon=True).start()
        return self

    def stop(self) -> None:
        """End everything."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        self.cut()

    # How it behaves

    def pass_through(self) -> None:
        """Behave like a working network again; data that was held back is delivered."""
        self._delay, self._is_mute, self._refuses = 0.0, False, False
        for link in self.links:
            link.speaks.set()

    def delay(self, seconds: float) -> None:
        """Hold each chunk back for so long, in either direction."""
        self._delay = seconds

    def black_hole(self, *, new: bool = True) -> None:
        """Hold back all data, without an error.

        ``new=False``: only on connections that there are, as when a router has forgotten them.
        """
        self._is_mute = new
        for link in self.links:
            link.speaks.clear()

    def lead_to(self, host: str, port: int | str = 5432) -> None:
        """Lead to another server from now on; what is open ends. As an address that moves in a failover."""
        self.host, self.server_port = host, int(port or 5432)
        self.cut()

    def cut(self, *, new: bool = False) -> None:
        """Reset all connections. ``new=True``: those to come as well, as when the server is down."""
        self._refuses = new
        for link in self.links:
            link.reset()

    @property
    def links(self) -> list[_Link]:
        """The connections that are open."""
        with self._lock:
            self._links = [link for link in self._links if not link.is_over.is_set()]
            return list(self._links)

    # Inside

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            link = _Link(self, client)
            with self._lock:
                self._links.append(link)
            if self._refuses:
                link.reset()
            elif self._is_mute:
                link.speaks.clear()
            threading.Thread(target=link.run, name="proxy-link", daemon=True).start()

    def connect(self) -> socket.socket:
        """Return a connection to the server."""
        if not self.host.startswith("/"):
            return socket.create_connection((self.host, self.server_port), timeout=60)
        server = socket.socket(socket.AF_UNIX)
        server.connect(os.path.join(self.host, f".s.PGSQL.{self.server_port}"))
        return server

    def passes(self, link: _Link, data: bytes, *, is_answer: bool) -> bool:
        """Wait as long as a chunk is to be held back. Return whether it is to be passed on at all."""
        if self._delay:
            time.sleep(self._delay)
        return True


class _Link:
    """One connection through the proxy: two sockets, and a thread for each direction."""

    def __init__(self, proxy: Proxy, client: socket.socket) -> None:
        self.proxy = proxy
        self.client = client
        self.server: socket.socket | None = None
        self.speaks = threading.Event()
        self.speaks.set()
        self.is_over = threading.Event()

    def run(self) -> None:
        try:
            self.speaks.wait()
            self.server = self.proxy.connect()
            self.server.settimeout(None)
            threading.Thread(target=self._pump, args=(self.server, self.client), name="proxy-link", daemon=True).start()
            self._pump(self.client, self.server)
        except OSError:
            self.reset()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while not self.is_over.is_set() and (data := source.recv(CHUNK)):
                is_passed = self.proxy.passes(self, data, is_answer=source is self.server)
                self.speaks.wait()
                if is_passed:
                    target.sendall(data)
        # The end of the connection is held back as well: through a black hole the other side does not learn of it.
        self.speaks.wait()
        self.reset()

    def reset(self) -> None:
        """End the connection on both sides."""
        self.is_over.set()
        self.speaks.set()
        for end in (self.client, self.server):
            if end is not None:
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RD)  # wakes a thread that reads here
                end.close()
