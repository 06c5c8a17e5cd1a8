"""The servers that people run Django with, each as real processes with the project of this folder."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from example_project.demo.processes import free_port
from tests.conftest import NEVER, ROOT

#: Seconds for a server to start, on a machine that is busy.
START_LIMIT = 180.0

_PERSISTENT = {"WEB_CONN_MAX_AGE": "600"}
_POOL = {"WEB_POOL": "1"}
_TRANSACTION_SCOPE = {"WEB_SCOPE": "transaction"}


def _gunicorn(*arguments: str) -> tuple[str, ...]:
    application = "qa.web.project.wsgi:application"
    usual = ("--bind=127.0.0.1:{port}", "--workers=2", "--timeout=120", "--no-control-socket")
    return ("-m", "gunicorn", application, *usual, *arguments)


_GTHREAD = _gunicorn("--worker-class=gthread", "--threads=4", "--preload")
_GEVENT = _gunicorn("--worker-class=gevent", "--worker-connections=50")
# Started through the module: the program's own name differs between the packages that bring it.
_UWSGI = (
    *("-c", "import sys, pyuwsgi; pyuwsgi.run(sys.argv[1:])"),
    *("--http-socket=127.0.0.1:{port}", "--module=qa.web.project.wsgi:application", "--need-app", "--master"),
    *("--processes=2", "--enable-threads", "--die-on-term", "--disable-logging"),
)
_UVICORN = ("-m", "uvicorn", "qa.web.project.asgi:application", "--port={port}", "--lifespan=off", "--no-access-log")
_DAPHNE = ("-m", "daphne", "-b", "127.0.0.1", "-p", "{port}", "qa.web.project.asgi:application")
_RUNSERVER = ("-m", "django", "runserver", "127.0.0.1:{port}", "--noreload", "--skip-checks")


# Becomes the server. The end of the pipe is the end of the tests, whatever it was: then the server's processes go, too.
RUN = 'exec 3<&0; (read -r end <&3; kill -9 0) & exec "$@" 3<&- </dev/null'


@dataclass(frozen=True)
class Kind:
    """A server program with a way to keep database connections. ``database`` is the fixture with its DATABASE_URL."""

    program: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    is_asgi: bool = False
    has_asyncio: bool = True
    is_scope_transaction: bool = False
    database: str = "direct"


KINDS = {
    "gunicorn_sync": Kind(_gunicorn("--worker-class=sync"), _PERSISTENT),
    "gunicorn_sync_closing": Kind(_gunicorn("--worker-class=sync")),
    "gunicorn_gthread": Kind(_GTHREAD, _PERSISTENT),
    "gunicorn_gthread_pool": Kind(_GTHREAD, _POOL),
    # No coroutines here: all greenlets are one thread, which has one event loop at most.
    "gunicorn_gevent": Kind(_GEVENT, has_asyncio=False),
    "gunicorn_gevent_pool": Kind(_GEVENT, _POOL, has_asyncio=False),
    "uwsgi": Kind(_UWSGI, _PERSISTENT),
    "runserver": Kind(_RUNSERVER, {"WEB_DEBUG": "1"}),
    "uvicorn": Kind(_UVICORN, is_asgi=True),
    "uvicorn_persistent": Kind(_UVICORN, _PERSISTENT, is_asgi=True),
    "uvicorn_pool": Kind(_UVICORN, _POOL, is_asgi=True),
    "daphne": Kind(_DAPHNE, is_asgi=True),
    "daphne_pool": Kind(_DAPHNE, _POOL, is_asgi=True),
    "pgbouncer_session": Kind(_GTHREAD, _PERSISTENT, database="session_pooler"),
    "pgbouncer_transaction": Kind(
        _UVICORN, _TRANSACTION_SCOPE, is_asgi=True, is_scope_transaction=True, database="transaction_pooler"
    ),
}
ALL = tuple(KINDS)
ASGI = tuple(name for name, kind in KINDS.items() if kind.is_asgi)


class Site:
    """A server of one kind, and the folder through which tests and requests see each other."""

    def __init__(self, name: str, folder: Path, url: str) -> None:
        self.name = name
        self.kind = KINDS[name]
        self.gates = folder / "gates"
        self.errors = folder / "errors.log"
        self.output = folder / "output.log"
        self.gates.mkdir()
        self.url = url
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Site:
        """Start the server and wait until it answers."""
        self.port = free_port()
        command = [sys.executable, *(word.format(port=self.port) for word in self.kind.program)]
        self._end_pipe()
        with self.output.open("ab") as output:
            self._process = subprocess.Popen(
                ["sh", "-c", RUN, "sh", *command], env=self._environment(), cwd=ROOT, start_new_session=True,
                stdin=subprocess.PIPE, stdout=output, stderr=output,
            )  # fmt: skip
        assert self._becomes_ready(), f"{self.name} does not answer:\n{self.output.read_text()}"
        return self

    def revive(self) -> None:
        """Have a server again after a process of it was killed: a worker process is started again by its server."""
        if not self._becomes_ready():
            self.start()

    def end(self) -> str:
        """Say how the server has ended, with the last that it printed; an empty string while it runs."""
        if self._process is None or (status := self._process.poll()) is None:
            return ""
        return f"{self.name} has ended with status {status}:\n{self.output.read_text()[-5000:]}"

    def stop(self) -> None:
        """End the server and all processes that it has started."""
        if self._process is None:
            return
        # At once, for what is open may never end by itself: a test may have failed.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(NEVER)
        self._end_pipe()

    def _end_pipe(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def _environment(self) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if not name.startswith(("WEB_", "COVERAGE_"))}
        return {
            **own,
            **self.kind.environment,
            "DATABASE_URL": self.url,
            "DJANGO_SETTINGS_MODULE": "qa.web.project.settings",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            # A server that crashes says where.
            "PYTHONFAULTHANDLER": "1",
            "WEB_NAME": self.name,
            "WEB_GATES": str(self.gates),
            "WEB_ERRORS": str(self.errors),
        }

    def _becomes_ready(self) -> bool:
        """Wait until the server answers; return whether it does, or has ended."""
        deadline = time.monotonic() + START_LIMIT
        while not _answers(f"http://127.0.0.1:{self.port}/ready/"):
            if self._process is None or self._process.poll() is not None or time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=20) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False
