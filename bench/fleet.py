"""What N worker processes cost one server, for N from 1 to 200: busy, idle, started, stopped and killed at once.

    .venv/bin/python bench/fleet.py run --workers 100 200 --name after --into bench/fleet.json
    .venv/bin/python bench/fleet.py draw bench/fleet.json

    .venv/bin/python bench/fleet.py run --workers 40 --processes 4 --name supervised --into /tmp/supervised.json

With ``--processes`` the workers run under supervisors with so many processes each, as ``runlockworker --processes``
starts them; then only the start, the idle fleet and the trickle are measured.

``run`` starts a private PostgreSQL with fsync on and adds the figures of each N to a file; ``--name`` says what they
are called there. ``draw`` prints the tables of that file, and writes ``docs/_static/fleet.svg``.

Nearly all figures are counts or CPU times, of the server's processes and of the workers', so that a busy machine
disturbs little. Statements are counted by pg_stat_statements. Where a figure is a time of the clock, it says so.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psycopg

from bench.contestants.base import Failed
from bench.fleet_picture import draw
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
#: Seconds of the idle window. It begins when all sessions have reported what they did, and all workers have done what
#: they do once at their start, such as their first poll and their first round of upkeep off duty.
IDLE, REPORTED = 60.0, 120.0
#: Calls of the trickle, and how many a second.
TRICKLE, RATE = 200, 20
#: No-op tasks and 20 ms tasks of one drain.
NOTHINGS, NAPS = 20_000, 2_000
TICKS = os.sysconf("SC_CLK_TCK")

#: Parts of a worker, and a text that only their statements have.
PARTS: dict[str, str] = {
    "beat": 'INSERT INTO "django_pglock_worker" AS worker',
    "upkeep": "pg_try_advisory_xact_lock",
    "look": "WITH RECURSIVE found",
    "claim": 'UPDATE "django_pglock_task" SET "status" = $',
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


def pss_of(pid: int) -> float:
    """Return the megabytes of a process, a page that n processes share as the n-th part of it."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    return 0.0


def lives(pid: int) -> bool:
    """Say whether a process exists and is no zombie."""
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
        self.supervisors: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Fleet:
        self._forge = subprocess.Popen(
            [sys.executable, "-m", "bench.forge"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=self.server.environment, cwd=ROOT, text=True,
        )  # fmt: skip
        self._read()
        return self

    def __exit__(self, *error: object) -> None:
        for supervisor in self.supervisors:
            supervisor.kill()
            supervisor.wait()
        for pid in self.workers:
            for child in [*children_of(pid), pid]:
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
        self._forge.stdin.close()  # type: ignore[union-attr]
        self._forge.wait()

    def tell(self, *words: object) -> list[int]:
        """Have the program do something; return what it answers."""
        assert self._forge.stdin is not None
        self._forge.stdin.write(" ".join(map(str, words)) + "\n")
        self._forge.stdin.flush()
        return self._read()

    def _read(self) -> list[int]:
        assert self._forge.stdout is not None
        if not (line := self._forge.stdout.readline()):
            raise Failed("the program that forks the workers has ended")
        return list(json.loads(line))

    def start(self, count: int, processes: int = 1) -> None:
        """Start workers and wait until all of them sleep, because there is nothing to do.

        ``processes``: they run under supervisors with so many processes each; 1: without.
        """
        if processes == 1:
            self.workers = self.tell("workers", count, 2)
            self.until_asleep()
            return
        command = [sys.executable, "-m", "django", "runlockworker", "--processes", str(processes)]
        self.supervisors = [
            subprocess.Popen(command, env=self.server.environment, cwd=ROOT, stderr=subprocess.DEVNULL)
            for _ in range(count // processes)
        ]
        self.until_asleep(count)
        self.workers = [pid for (pid,) in self.server.ask("SELECT pid FROM django_pglock_worker -- bench")]

    def until_asleep(self, count: int = 0) -> None:
        """Wait until the rows of all living workers, or of so many, say that they sleep."""
        asleep = "SELECT count(*) FROM django_pglock_worker WHERE is_sleeping -- bench"
        until(lambda: self.server.one(asleep) >= (count or len(self.workers)), "not all workers sleep", each=0.2)

    def cpu(self) -> float:
        """Return the seconds of CPU of all workers, their heartbeat processes and their supervisors."""
        workers = [each for pid in self.workers for each in [pid, *children_of(pid)]]
        return sum(map(cpu_of, [*workers, *(each.pid for each in self.supervisors)]))


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


def start_storm(fleet: Fleet, count: int, processes: int) -> dict[str, float]:
    """Start all workers at once."""
    found: dict[str, float] = {}
    fleet.server.reset()
    with spent(fleet, found):
        fleet.start(count, processes)
    return {
        "start, s of the clock": found["clock"],
        "start, server ms a worker": 1000 * found["server"] / count,
        "start, statements a worker": fleet.server.statements()["all"] / count,
        "start, workers that failed": sum(not lives(pid) for pid in fleet.workers),
    }


def idle(fleet: Fleet, count: int) -> dict[str, float]:
    """Let all workers idle."""
    server = fleet.server
    time.sleep(REPORTED)
    sessions = dict(server.ask(
        "SELECT application_name, count(*) FROM pg_stat_activity "
        "WHERE datname = 'fleet' AND application_name <> 'bench' GROUP BY 1 -- bench"
    ))  # fmt: skip
    memory = [sum(map(pss_of, [pid, *children_of(pid)])) for pid in fleet.workers]
    found: dict[str, float] = {}
    server.reset()
    before = server.transactions()
    with spent(fleet, found):
        time.sleep(IDLE)
    sent = server.statements()
    rate = count * found["clock"]
    # The statement that asks for the position in the WAL, twice, is not theirs.
    return {
        "idle, transactions a second a worker": max(0, server.transactions() - before - 4) / rate,
        **{f"idle, {part} a second a worker": sent[part] / rate for part in ("all", "beat", "upkeep", "look", "sleep")},
        "idle, server ms a second": 1000 * found["server"] / found["clock"],
        "idle, client ms a second": 1000 * found["client"] / found["clock"],
        "sessions a worker": sum(sessions.values()) / count,
        "MB a worker": statistics.mean(memory),
    }


def one_by_one(fleet: Fleet, count: int) -> dict[str, float]:
    """Enqueue some tasks a second while all workers sleep."""
    server = fleet.server
    server.empty()
    fleet.until_asleep()
    found: dict[str, float] = {}
    server.reset()
    with spent(fleet, found):
        fleet.tell("trickle", TRICKLE, RATE)
        until(lambda: len(server.stamps.read_text().splitlines()) >= TRICKLE, "the trickle has not run")
    sent = server.statements()
    late = sorted(1000 * float(line) for line in server.stamps.read_text().splitlines())
    return {
        "trickle, statements a task": sent["all"] / TRICKLE,
        "trickle, claims a task": sent["claim"] / TRICKLE,
        "trickle, server ms a task": 1000 * found["server"] / TRICKLE,
        "trickle, client ms a task": 1000 * found["client"] / TRICKLE,
        "trickle, p50 ms": late[len(late) // 2],
        "trickle, p99 ms": late[int(len(late) * 0.99)],
    }


def drain(fleet: Fleet, name: str, count: int, *call: object) -> dict[str, float]:
    """Enqueue many tasks at once, while all workers sleep, and wait until all have run."""
    server = fleet.server
    server.empty()
    fleet.until_asleep()
    waits: list[Counter[str]] = []
    left = "SELECT NOT EXISTS (SELECT FROM django_pglock_task WHERE status <> 'SUCCESSFUL') -- bench"

    def is_done() -> bool:
        waits.append(server.lock_waits())
        return bool(server.one(left))

    found: dict[str, float] = {}
    server.reset()
    with spent(fleet, found):
        fleet.tell("many", count, *call)
        until(is_done, f"not all {name} tasks have run")
    sent = server.statements()
    most = sum(waits, Counter[str]()).most_common(1)
    print(f"  {name}: waits {most}", file=sys.stderr)
    dead = "SELECT n_dead_tup FROM pg_stat_user_tables WHERE relname = 'django_pglock_task' -- bench"
    return {
        f"{name}, server µs a task": 1e6 * found["server"] / count,
        f"{name}, client µs a task": 1e6 * found["client"] / count,
        f"{name}, statements a task": sent["all"] / count,
        f"{name}, claims a task": sent["claim"] / count,
        f"{name}, tasks a second of the clock": count / found["clock"],
        f"{name}, sessions that wait for a lock": sum(map(Counter.total, waits)) / len(waits),
        f"{name}, WAL bytes a task": found["wal"] / count,
        f"{name}, dead rows a task": server.one(dead) / count,
    }


def kill_and_stop(fleet: Fleet, count: int) -> dict[str, float]:
    """Kill half of the workers while each thread has a task, then stop the others."""
    server = fleet.server
    server.empty()
    fleet.until_asleep()
    fleet.tell("many", 4 * count, "sleep", 3600)
    running = "SELECT count(*) FROM django_pglock_task WHERE status = 'RUNNING' -- bench"
    until(lambda: server.one(running) == 4 * count, "not all long tasks run")
    found: dict[str, float] = {}
    killed, fleet.workers = fleet.workers[: count // 2], fleet.workers[count // 2 :]
    if killed:
        theirs = "SELECT array_agg(id) FROM django_pglock_worker WHERE pid = ANY (%s) -- bench"
        ids = server.one(theirs, killed)
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        owned = f"{running.removesuffix(' -- bench')} AND worker = ANY (%s) -- bench"
        found["kill, s of the clock until all tasks are rescued"] = until(
            lambda: not server.one(owned, ids), "not all tasks are rescued"
        )
    stopped: dict[str, float] = {}
    workers = list(fleet.workers)
    began = time.monotonic()
    for pid in workers:
        os.kill(pid, signal.SIGTERM)
    until(lambda: not any(map(lives, workers)), "not all workers have ended", each=0.2)
    stopped["stop, s of the clock after 2 s of grace"] = time.monotonic() - began
    stopped["stop, tasks not given back"] = server.one(running)
    stopped["stop, rows of workers left"] = server.one("SELECT count(*) FROM django_pglock_worker")
    fleet.workers = []
    return {**found, **stopped}


def measure(count: int, processes: int) -> dict[str, float]:
    """Return all figures of a fleet of so many workers; of one under supervisors, the first ones."""
    found: dict[str, float] = {}
    with Server() as server:
        server.prepare()
        server.empty()
        with Fleet(server) as fleet:
            found |= start_storm(fleet, count, processes)
            found |= idle(fleet, count)
            found |= one_by_one(fleet, count)
            if processes == 1:
                found |= drain(fleet, "no-op", NOTHINGS, "nothing")
                found |= drain(fleet, "20 ms", NAPS, "sleep", 0.02)
                found |= kill_and_stop(fleet, count)
        server.fleet.close()
    return found


def run(options: argparse.Namespace) -> None:
    """Measure fleets and add their figures to the file."""
    for count in options.workers:
        print(f"{options.name}: {count} workers", file=sys.stderr, flush=True)
        began = time.monotonic()
        figures = measure(count, options.processes)
        known = json.loads(options.into.read_text()) if options.into.exists() else {}
        known.setdefault(options.name, {})[str(count)] = figures
        known["when"] = (
            f"{date.today():%d %B %Y}, {os.cpu_count()} cores ({platform.machine()}), Python "
            f"{platform.python_version()}, load {os.getloadavg()[0]:.0f}"
        )
        options.into.write_text(json.dumps(known, indent=1, ensure_ascii=False))
        print(f"  {time.monotonic() - began:.0f} s {json.dumps(figures, indent=1)}", file=sys.stderr, flush=True)


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    running = verbs.add_parser("run")
    running.add_argument("--workers", type=int, nargs="+", default=[1, 2, 5, 10, 20, 50, 100, 200])
    running.add_argument("--processes", type=int, default=1)
    running.add_argument("--name", default="after")
    running.add_argument("--into", type=Path, default=Path("fleet.json"))
    running.set_defaults(call=run)
    drawing = verbs.add_parser("draw")
    drawing.add_argument("file", type=Path)
    drawing.set_defaults(call=lambda options: draw(options.file))
    options = parser.parse_args()
    options.call(options)


if __name__ == "__main__":
    main()
