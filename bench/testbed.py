"""Where the contestants meet: one durable PostgreSQL, a fresh database for each run, worker processes, and the clock.

**The clock** starts at the first poll that sees a finished task. It stops at the last poll that sees fewer tasks left
than the poll before, and at least one. The rate is what was finished in between. So neither the start of a worker
counts, nor when it is noticed that all are done: a poll takes longer the more there is, and to wait for the end would
cost the fastest most. The same rule holds for all, and all are observed from outside, through what they leave in the
database (Celery: in Redis).
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import psycopg

from bench.contestants.base import Contestant, Failed, last_words, run
from bench.wire import Wire
from example_project.postgres import PrivatePostgres

ROOT = Path(__file__).resolve().parent.parent
#: Seconds after which a worker that has not done what it should has failed.
PATIENCE = 600.0


class Testbed:
    """A server, and what is done on it. As a context manager it starts and stops."""

    def __init__(self) -> None:
        self._server = PrivatePostgres(durable=True)
        self._folder = tempfile.TemporaryDirectory(prefix="bench-")
        self._templates: set[str] = set()
        self._running: list[subprocess.Popen[bytes]] = []
        self._stack = ExitStack()
        self.stamps = Path(self._folder.name) / "stamps"
        #: Where the processes of contestants find the server, if not at the server itself.
        self.host = ""

    def __enter__(self) -> Testbed:
        self._stack.enter_context(self._folder)
        self._stack.enter_context(self._server)
        self._admin = self._stack.enter_context(self.connect("postgres"))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def connect(self, database: str) -> psycopg.Connection:
        """Return a connection to a database; each statement is a transaction of its own."""
        folder = str(self._server.folder)
        # Watching must not read the table again and again: an index leads past what is finished.
        return psycopg.connect(
            host=folder, user="postgres", dbname=database, autocommit=True, options="-c enable_seqscan=off"
        )

    def value(self, statement: str, *values: Any) -> Any:
        """Return the one value of a statement on the server, asked from no contestant's database."""
        return self._admin.execute(statement, values).fetchone()[0]

    def fresh(self, contestant: Contestant) -> psycopg.Connection:
        """Give a contestant an empty database, and return a connection to it."""
        key = contestant.key
        if key not in self._templates:
            self._admin.execute(f"CREATE DATABASE {key}_empty")
            self.call(contestant, "setup", database=f"{key}_empty")
            self._templates.add(key)
        self._admin.execute(f"DROP DATABASE IF EXISTS {key} WITH (FORCE)")
        self._admin.execute(f"CREATE DATABASE {key} TEMPLATE {key}_empty")
        self.stamps.write_text("")
        contestant.refresh()
        return self.connect(key)

    def filled(self, contestant: Contestant, count: int, *what: str) -> psycopg.Connection:
        """Return a connection to an empty database with ``count`` tasks that wait."""
        database = self.fresh(contestant)
        self.fill(contestant, database, count, *what)
        if (left := contestant.left(database, *what[:1] or ("nothing",))) != count:
            raise Failed(f"{left:,} tasks are waiting after {count:,} were enqueued")
        return database

    def filled_by_key(
        self, contestant: Contestant, count: int, function: str, keys: int, *what: str
    ) -> psycopg.Connection:
        """Return a connection to an empty database with ``count`` tasks that wait, with so many keys."""
        database = self.fresh(contestant)
        self.call(contestant, "keyed", str(count), function, str(keys), *what)
        settle_down(database)
        return database

    def fill(self, contestant: Contestant, database: psycopg.Connection, count: int, *what: str) -> None:
        """Add tasks, and let the work that this leaves behind be done before the clock starts."""
        self.call(contestant, "many", str(count), *what)
        settle_down(database)

    def call(self, contestant: Contestant, *words: str, database: str = "") -> str:
        """Run a verb of a contestant's program and return what it prints."""
        return run(
            [*contestant.command, *words],
            timeout=3600,
            cwd=ROOT,
            env=self._environment(contestant, database or contestant.key),
        )

    def stamped(self) -> list[float]:
        """Return the times that the function ``stamp`` has noted, in milliseconds."""
        return [1000 * float(line) for line in self.stamps.read_text().splitlines()]

    @contextmanager
    def counting(self) -> Iterator[Wire]:
        """Count the messages of the processes that are started in a block."""
        wire = Wire(self._server.folder)
        self.host = wire.host
        try:
            yield wire
        finally:
            self.host = ""
            wire.close()

    def server_cpu(self) -> float:
        """Return the seconds of CPU that the server has used, with all of its processes."""
        assert self._server._server is not None
        return cpu(self._server._server.pid)

    @contextmanager
    def worker(self, contestant: Contestant, *options: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run a worker process for a while, with whatever processes it starts."""
        log = Path(self._folder.name) / f"log-{len(self._running)}"
        with log.open("wb") as file:
            process = subprocess.Popen(
                contestant.worker(*options),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                cwd=ROOT,
                env=self._environment(contestant, contestant.key),
                start_new_session=True,
            )
        self._running.append(process)
        try:
            yield process
        except Failed as error:
            raise Failed(f"{error}; its last words: {last_words(log.read_text()) or 'none'}") from None
        finally:
            self._running.remove(process)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def rate(self, contestant: Contestant, database: Any, total: int, function: str = "nothing") -> float:
        """Return the finished tasks a second, of ``total`` that wait, by the rule above."""
        looks: list[tuple[float, int]] = []

        def look() -> bool:
            # The moment before: a statement sees what was committed when it began.
            now = time.perf_counter()
            left = contestant.left(database, function)
            # Between the ends of two long tasks, several looks see the same number. Only the first is near an end.
            if 0 < left < total and (not looks or left < looks[-1][1]):
                looks.append((now, left))
            return left == 0

        self.until(look)
        (began, waiting), (ended, left) = (looks[0], looks[-1]) if looks else ((0.0, 0), (0.0, 0))
        if waiting - left < total / 2:
            raise Failed(f"only {waiting - left:,} of {total:,} tasks were seen to finish; give it more --tasks")
        return (waiting - left) / (ended - began)

    def until(self, condition: Callable[[], Any]) -> Any:
        """Wait until something is true and return it. Asking takes up to a tenth of the time.

        Raises ``Failed`` when a worker ends meanwhile, or when it takes too long.
        """
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            asked = time.perf_counter()
            if answer := condition():
                return answer
            if any(process.poll() for process in self._running):
                raise Failed("the worker ended")
            time.sleep(max(0.005, 10 * (time.perf_counter() - asked)))
        raise Failed(f"it was not done after {PATIENCE:.0f} s")

    def _environment(self, contestant: Contestant, database: str) -> dict[str, str]:
        server = {"PGHOST": self.host or str(self._server.folder), "PGUSER": "postgres", "PGDATABASE": database}
        ours = {"PYTHONPATH": str(ROOT), "BENCH_STAMPS": str(self.stamps)}
        return {**os.environ, **server, **ours, **contestant.environment}


def configure(folder: str, *apps: str) -> None:
    """Set Django up in this process, with our app and others, on the server in a folder."""
    import django
    from django.conf import settings

    database = {"ENGINE": "django.db.backends.postgresql", "NAME": "postgres", "USER": "postgres", "CONN_MAX_AGE": None}
    settings.configure(
        DATABASES={"default": {**database, "HOST": folder}},
        INSTALLED_APPS=["django_pglock", *apps],
        TASKS={"default": {"BACKEND": "django_pglock.backend.PostgresBackend"}},
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
        USE_TZ=True,
    )
    django.setup()


def settle_down(database: psycopg.Connection) -> None:
    """Let the work that many new tasks leave behind be done."""
    database.execute("VACUUM ANALYZE")
    database.execute("CHECKPOINT")


def cpu(pid: int) -> float:
    """Return the seconds of CPU that a process and its children have used, those that have ended as well."""
    root, seconds = psutil.Process(pid), 0.0
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            seconds += sum(process.cpu_times()[:4])
    return seconds


def resident(process: subprocess.Popen[bytes]) -> float:
    """Return the resident memory of a process, in megabytes."""
    return int(run(["ps", "-o", "rss=", "-p", str(process.pid)])) / 1024


def threads(process: subprocess.Popen[bytes]) -> int:
    """Return how many threads a process has."""
    return int(run(["ps", "-o", "nlwp=", "-p", str(process.pid)]))
