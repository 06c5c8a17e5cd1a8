"""What the scenarios and tests of web systems use: servers as real processes, a browser, and a look at the provider."""

from __future__ import annotations

import http.client
import json
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from urllib.parse import urlencode

from django.conf import settings

from example_project.demo.processes import Fleet, free_port
from example_project.demo.shoppers import log_in

#: Seconds until a server that does not answer counts as broken.
NEVER = 120.0
GUNICORN = "gunicorn example_project.wsgi --bind=127.0.0.1:{} --workers=2 --threads=4 --timeout=0 --no-control-socket"
UVICORN = "uvicorn example_project.asgi:application --port={} --workers=2 --lifespan=off --no-access-log"
PAYMENTS = "example_project.systems.payments.server {}"


class Answer(NamedTuple):
    """The answer to a request."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def content(self) -> Any:
        """The answer as JSON."""
        return json.loads(self.body)


class Browser:
    """Sends requests to a server, as a user if one is given. It may be used by many threads at once."""

    def __init__(self, port: int, user: Any = None) -> None:
        self.port = port
        token = secrets.token_hex(16)
        session = f"{settings.SESSION_COOKIE_NAME}={log_in(user)}; " if user is not None else ""
        self.headers = {"Cookie": f"{session}{settings.CSRF_COOKIE_NAME}={token}", "X-CSRFToken": token}

    def get(self, path: str, **headers: str) -> Answer:
        """Send a GET."""
        return self._send("GET", path, None, headers)

    def post(self, path: str, data: dict[str, Any] | None = None, **headers: str) -> Answer:
        """Send a form. Names of headers are written with underscores."""
        form = {"Content_Type": "application/x-www-form-urlencoded"}
        return self._send("POST", path, urlencode(data or {}), {**form, **headers})

    def post_at_once(self, times: int, path: str, data: dict[str, Any] | None = None) -> list[Answer]:
        """Send a form ``times`` times at once."""
        with ThreadPoolExecutor(times) as pool:
            return list(pool.map(lambda _: self.post(path, data), range(times)))

    def _send(self, method: str, path: str, body: str | None, headers: dict[str, str]) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=NEVER)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, {**self.headers, **named})
            response = connection.getresponse()
            return Answer(response.status, dict(response.headers), response.read())
        finally:
            connection.close()


class Provider(Browser):
    """The payment provider, a process of its own."""

    def book(self) -> list[dict[str, Any]]:
        """Return what the provider has done."""
        book: list[dict[str, Any]] = self.get("/book").content
        return book


class Site:
    """The provider and the web servers of a fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._ports: dict[str, int] = {}
        self.provider = Provider(*self.serve(PAYMENTS))
        # For what the fleet starts from now on.
        fleet.environment["PAYMENTS_URL"] = f"http://127.0.0.1:{self.provider.port}"

    def serve(self, *commands: str) -> list[int]:
        """Start the servers that do not run yet, wait until all of them answer, and return their ports."""
        started = {command: self._start(command) for command in commands if command not in self._ports}
        for command, process in started.items():
            self._wait_for(process, self._ports[command])
        return [self._ports[command] for command in commands]

    def _start(self, command: str) -> subprocess.Popen[bytes]:
        port = self._ports[command] = free_port()
        return self.fleet.run([sys.executable, "-m", *command.format(port).split()])

    def _wait_for(self, process: subprocess.Popen[bytes], port: int) -> None:
        deadline = time.monotonic() + NEVER
        while time.monotonic() < deadline:
            self.fleet.require_running(process)
            try:
                Browser(port).get("/healthz/")
            except OSError:
                time.sleep(0.05)
            else:
                return
        raise TimeoutError(f"No server answers on port {port}:\n{self.fleet.output()}")


def wait_for(function: Callable[[], Any]) -> Any:
    """Wait until a function returns something true, and return that. Raises ``TimeoutError``."""
    deadline = time.monotonic() + NEVER
    while time.monotonic() < deadline:
        if value := function():
            return value
        time.sleep(0.05)
    raise TimeoutError("What the scenario waits for has not happened.")
