"""``manage.py serveshop PORT``: the shop on loopback, for the demo. For a real site use a real server."""

from __future__ import annotations

import socket
from typing import Any

from django.contrib.staticfiles.handlers import StaticFilesHandler
from django.core.management import BaseCommand, CommandParser
from django.core.servers.basehttp import ThreadedWSGIServer, WSGIRequestHandler
from django.core.wsgi import get_wsgi_application


class ShopServer(ThreadedWSGIServer):
    """Django's threaded server, with a listen queue for many requests at the same moment.

    ``inherited`` is a socket that listens on the address already.
    """

    # With ten, as in runserver, the eleventh request of the same moment gets a reset connection.
    request_queue_size = 256

    def __init__(self, address: tuple[str, int], inherited: socket.socket | None = None) -> None:
        self._inherited = inherited
        super().__init__(address, WSGIRequestHandler)

    def server_bind(self) -> None:
        """Bind the socket, unless a listening one was inherited."""
        if self._inherited is None:
            super().server_bind()
            return
        self.socket.close()
        self.socket = self._inherited
        self.server_name, self.server_port = self.server_address = self.socket.getsockname()
        self.setup_environ()


class Command(BaseCommand):
    """Serves the shop and the admin on 127.0.0.1."""

    help = "Serve the shop and the admin on 127.0.0.1, one thread for each request."

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the arguments."""
        parser.add_argument("port", type=int, help="Port on loopback.")
        parser.add_argument("--fd", type=int, help="Descriptor of an inherited socket that listens on this port.")

    def handle(self, *args: Any, port: int, fd: int | None, **options: Any) -> None:
        """Serve until the process ends."""
        server = ShopServer(("127.0.0.1", port), None if fd is None else socket.socket(fileno=fd))
        server.daemon_threads = True
        server.set_app(StaticFilesHandler(get_wsgi_application()))
        server.serve_forever()
