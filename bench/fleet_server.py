"""The server of a fleet and its workers: they are started, counted and metered from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg

from bench.contestants.base import Failed
from example_project.postgres import PrivatePostgres

ROOT = Path(__file__).resolve().parent.parent
#: Sessions of one worker are five and one for each of its four threads; hundreds of workers need thousands.
SETTINGS = {
    "max_connections": "2500",
    "shared_preload_libraries": "pg_stat_statements",
    "pg_stat_statements.max": "5000",
    "deadlock_timeout": "1s",
    "log_lock_waits": "on",
}
#: Seconds after which something that has to happen has failed.
NEVER = 600.0
TICKS = os.sysconf("SC_CLK_TCK")

#: Parts of a worker, and a text that only their statements have.
PARTS: dict[str, str] = {
    "beat": 'INSERT INTO "django_pglock_worker" AS worker',
    "upkeep": "pg_try_advisory_xact_lock",
    "look": "WITH RECURSIVE found",
    "claim": "WITH claimed AS MATERIALIZED",
    "sleep": 'UPDATE "django_pglock_worker" SET "is_sleeping"',
}


class Server:
    """The private server and what is asked of it from outside."""

    def __enter__(self) -> Server:
        self._server = PrivatePostgres(durable=True, settings=SETTINGS).start()
        self.admin = psycopg.connect(self._dsn("postgres"), autocommit=True)
        self.admin.execute("CREATE DATABASE fleet")
        self.stamps = Path(self._server.home) / "stamps"
        self.postmaster = int((self._server.folder / "data" / "postmaster.pid").read_text().split()[0])
        return self

    def __exit__(self, *error: object) -> None:
        self.admin.close()
        self._server.stop()

    def _dsn(self, database: str) -> str:
        return f"host={self._server.folder} user=postgres dbname={database} application_name=bench"

    @property
    def environment(self) -> dict[str, str]:
        """What the processes of the project need."""
        ours = {"DJANGO_SETTINGS_MODULE": "bench.app.settings", "BENCH_CONTESTANT": "ours", "PYTHONPATH": str(ROOT)}
        server = {"PGHOST": str(self._server.folder), "PGUSER": "postgres", "PGDATABASE": "fleet"}
        return {**os.environ, **ours, **server, "BENCH_STAMPS": str(self.stamps)}

    def prepare(self) -> None:
        """Make the tables, and the view of the statements."""
        command = [sys.executable, "-m", "bench.contestants.ours", "setup"]
        subprocess.run(command, env=self.environment, cwd=ROOT, check=True)
        self.fleet = psycopg.connect(self._dsn("fleet"), autocommit=True)
        self.fleet.execute("CREATE EXTENSION pg_stat_statements")

    def ask(self, statement: str, *values: Any) -> list[Any]:
        """Return the rows of a statement."""
        return self.fleet.execute(statement, values).fetchall()

    def one(self, statement: str, *values: Any) -> Any:
        """Return the one value of a statement."""
        return self.ask(statement, *values)[0][0]

    def empty(self) -> None:
        """Remove all tasks, and let what they leave behind be done before the clock starts."""
        self.fleet.execute("TRUNCATE django_pglock_task, django_pglock_attempt CASCADE")
        self.fleet.execute("VACUUM ANALYZE")
        self.fleet.execute("CHECKPOINT")
        self.stamps.write_text("")
        self.stamps.chmod(0o666)

    def reset(self) -> None:
        """Begin to count statements anew."""
        self.fleet.execute("SELECT pg_stat_statements_reset()")

    def statements(self) -> Counter[str]:
        """Return how often each part of the workers has sent its statement since the last reset; and all together."""
        found: Counter[str] = Counter()
        rows = self.ask(
            "SELECT query, calls FROM pg_stat_statements s JOIN pg_database d ON d.oid = s.dbid "
            "WHERE d.datname = 'fleet' AND query NOT LIKE '%%pg_stat_%%' AND query NOT LIKE '%%-- bench'"
        )
        for query, calls in rows:
            if query.upper() in ("BEGIN", "COMMIT", "ROLLBACK"):
                continue
            found["all"] += calls
            for part, text in PARTS.items():
                found[part] += calls * (text in query)
        return found

    def transactions(self) -> int:
        """Return how many transactions the database has seen."""
        return int(self.admin.execute(
            "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = 'fleet'"
        ).fetchone()[0])  # fmt: skip

    def cpu(self) -> float:
        """Return the seconds of CPU that all processes of the server have used, those that have ended too."""
        return sum(cpu_of(pid) for pid in [self.postmaster, *children_of(self.postmaster)])

    def lock_waits(self) -> Counter[str]:
        """Return how many sessions wait for which kind of lock now."""
        return Counter(dict(self.ask(
            "SELECT wait_event, count(*) FROM pg_stat_activity WHERE datname = 'fleet' "
            "AND wait_event_type IN ('Lock', 'LWLock') GROUP BY wait_event -- bench"
        )))  # fmt: skip


def cpu_of(pid: int) -> float:
    """Return the seconds of CPU of a process and of its children that have ended; 0 if it is gone."""
    with suppress(OSError, IndexError):
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, words[11:15])) / TICKS
    return 0.0


def children_of(pid: int) -> list[int]:
    """Return the processes that a process has started and that live."""
    with suppress(OSError):
        return [
            int(word)
            for each in Path(f"/proc/{pid}/task").iterdir()
            for word in (each / "children").read_text().split()
        ]
    return []


def with_descendants(pid: int) -> list[int]:
    """Return a process and all processes below it: of a worker, its starter and its children."""
    return [pid, *(each for child in children_of(pid) for each in with_descendants(child))]


def pss_of(pid: int) -> float:
    """Return the megabytes of a process, a page that n processes share as the n-th part of it."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    return 0.0


def lives(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def until(condition: Callable[[], Any], what: str, *, each: float = 0.05) -> float:
    """Wait until something is true; return the seconds that it took."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > NEVER:
            raise Failed(f"after {NEVER:.0f} s: {what}")
        time.sleep(each)
    return time.monotonic() - began


class Fleet:
    """The workers of one server, and the program that forks them."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.workers: list[int] = []
        self.processes = 1

    def __enter__(self) -> Fleet:
        self._parent = subprocess.Popen(
            [sys.executable, "-m", "bench.fork_workers"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=self.server.environment, cwd=ROOT, text=True,
        )  # fmt: skip
        self._read()
        return self

    def __exit__(self, *error: object) -> None:
        for pid in self.workers:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._parent.stdin.close()  # type: ignore[union-attr]
        self._parent.wait()

    def tell(self, *words: object) -> list[int]:
        """Have the program do something; return what it answers."""
        assert self._parent.stdin is not None
        self._parent.stdin.write(" ".join(map(str, words)) + "\n")
        self._parent.stdin.flush()
        return self._read()

    def _read(self) -> list[int]:
        assert self._parent.stdout is not None
        if not (line := self._parent.stdout.readline()):
            raise Failed("the program that forks the workers has ended")
        return list(json.loads(line))

    def start(self, count: int, processes: int = 1) -> None:
        """Start workers with so many processes each, and wait until all sleep, because there is nothing to do."""
        self.processes = processes
        self.workers = self.tell("workers", count, 2, processes)
        self.until_asleep()

    def until_asleep(self) -> None:
        """Wait until the rows of all processes of living workers say that they sleep."""
        asleep = "SELECT count(*) FROM django_pglock_worker WHERE is_sleeping -- bench"
        count = len(self.workers) * self.processes
        until(lambda: self.server.one(asleep) >= count, "not all workers sleep", each=0.2)

    def cpu(self) -> float:
        """Return the seconds of CPU of all workers."""
        return sum(cpu_of(each) for pid in self.workers for each in with_descendants(pid))


@contextmanager
def spent(fleet: Fleet, into: dict[str, float]) -> Iterator[None]:
    """Add the seconds of CPU, of the clock, and the bytes of WAL that a block takes."""
    server = fleet.server
    lsn = server.one("SELECT pg_current_wal_insert_lsn() -- bench")
    before, began = (server.cpu(), fleet.cpu()), time.monotonic()
    yield
    into["clock"] = time.monotonic() - began
    into["server"], into["client"] = server.cpu() - before[0], fleet.cpu() - before[1]
    into["wal"] = float(server.one("SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), %s) -- bench", lsn))
