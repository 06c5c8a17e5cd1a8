"""``manage.py serveshop PORT``: the shop on loopback, for the demo. For a real site use a real server."""

from __future__ import annotations

from typing import Any

from django.contrib.staticfiles.handlers import StaticFilesHandler
from django.core.management import BaseCommand, CommandParser
from django.core.servers.basehttp import ThreadedWSGIServer, WSGIRequestHandler
from django.core.wsgi import get_wsgi_application


class ShopServer(ThreadedWSGIServer):
    """Django's threaded server, with a listen queue for many requests at the same moment."""

    # With ten, as in runserver, the eleventh request of the same moment gets a reset connection.
    request_queue_size = 256


class Command(BaseCommand):
    """Serves the shop and the admin on 127.0.0.1."""

    help = "Serve the shop and the admin on 127.0.0.1, one thread for each request."

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the arguments."""
        parser.add_argument("port", type=int, help="Port on loopback.")

    def handle(self, *args: Any, port: int, **options: Any) -> None:
        """Serve for ever."""
        server = ShopServer(("127.0.0.1", port), WSGIRequestHandler)
        server.daemon_threads = True
        server.set_app(StaticFilesHandler(get_wsgi_application()))
        server.serve_forever()
