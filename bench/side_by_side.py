"""Compare this checkout with another one: both do the same at the same moment, on one server.

    pip install -r bench/requirements.txt
    git worktree add ../before COMMIT
    python bench/side_by_side.py drain ../before [--rounds N] [--tasks N]

On a shared machine the speed of one process changes by a third within minutes, so runs that follow each other cannot
show a difference of some per cent. Here whatever slows one side slows the other as well: two databases on one private
PostgreSQL with fsync on, and two processes that start together, in turn one first and then the other. The rate counts
while both sides work. CPU time is that of the process with its children, and of its sessions at the server.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import psycopg

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from example_project.postgres import PrivatePostgres

ROOT = Path(__file__).resolve().parent.parent
#: Seconds between two samples, and the share of the tasks up to which a round counts.
PAUSE, END = 0.25, 0.97
LEFT = "SELECT count(*) FROM django_pglock_task WHERE status IN ('READY', 'RUNNING')"
DONE = "SELECT count(*) FROM django_pglock_task"
SESSIONS = "SELECT pid FROM pg_stat_activity WHERE datname = %s AND application_name <> 'look'"
#: What enqueues, one call after the other.
ENQUEUE = """
import sys, django
django.setup()
from bench.app.tasks import nothing
nothing.enqueue()
print("ready", flush=True)
sys.stdin.readline()
for _ in range(int(sys.argv[1])):
    nothing.enqueue()
print("done", flush=True)
sys.stdin.readline()
"""


@dataclass
class Reading:
    """What one side has done by one moment: tasks, CPU seconds of the client and of the server."""

    tasks: int
    client: float
    server: float


class Side:
    """One checkout, with its database."""

    def __init__(self, name: str, folder: Path, server: PrivatePostgres, admin: psycopg.Connection) -> None:
        self.name, self.folder, self.admin = name, folder, admin
        place = {"PGHOST": str(server.folder), "PGUSER": "postgres", "PGDATABASE": name, "PYTHONPATH": str(folder)}
        ours = {"DJANGO_SETTINGS_MODULE": "bench.app.settings", "BENCH_CONTESTANT": "ours", "BENCH_STAMPS": os.devnull}
        ours["BENCH_PLAIN"] = "1"
        self.environment = {**os.environ, **place, **ours}
        admin.execute(f"CREATE DATABASE {name}")
        self.call("setup")
        admin.execute(f"ALTER DATABASE {name} RENAME TO {name}_empty")

    def call(self, *words: str) -> None:
        """Run a verb of the contestant's program of this checkout."""
        command = [sys.executable, "-W", "ignore", "-m", "bench.contestants.ours", *words]
        subprocess.run(command, cwd=self.folder, env=self.environment, check=True, stdout=subprocess.DEVNULL)

    def refresh(self, count: int) -> None:
        """Make the database anew, with so many tasks that wait."""
        self.admin.execute(f"DROP DATABASE IF EXISTS {self.name} WITH (FORCE)")
        self.admin.execute(f"CREATE DATABASE {self.name} TEMPLATE {self.name}_empty")
        if count:
            self.call("many", str(count))
        self.database = psycopg.connect(
            host=self.environment["PGHOST"],
            user="postgres",
            dbname=self.name,
            autocommit=True,
            application_name="look",
            options="-c enable_seqscan=off",
        )
        self.database.execute("VACUUM ANALYZE")

    def start(self, command: list[str]) -> None:
        """Start the process that is measured."""
        self.process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )

    def tell(self) -> None:
        """Let the process begin."""
        print(file=self.process.stdin, flush=True)

    def stop(self) -> None:
        """End the process."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.database.close()

    def read(self, tasks: Callable[[Side], int]) -> Reading:
        """Return what was done up to now."""
        own = psutil.Process(self.process.pid)
        sessions = [pid for (pid,) in self.admin.execute(SESSIONS, [self.name])]
        return Reading(
            tasks(self), _cpu([own.pid, *(each.pid for each in own.children(recursive=True))]), _cpu(sessions)
        )


def _cpu(processes: Iterable[int]) -> float:
    total = 0.0
    for pid in processes:
        try:
            times = psutil.Process(pid).cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def drain(sides: list[Side], count: int) -> list[Reading]:
    """Empty a full queue of no-op tasks by one worker process each."""
    for side in sides:
        side.refresh(count)
    sides[0].admin.execute("CHECKPOINT")
    for side in sides:
        side.start([sys.executable, "-m", "django", "runlockworker"])
    return _watch(sides, lambda side: count - _value(side, LEFT), count)


def enqueue(sides: list[Side], count: int) -> list[Reading]:
    """Enqueue no-op tasks one by one, from one process each."""
    for side in sides:
        side.refresh(0)
        side.start([sys.executable, "-c", ENQUEUE, str(count)])
    for side in sides:
        side.process.stdout.readline()
    for side in sides:
        side.tell()
    return _watch(sides, lambda side: _value(side, DONE) - 1, count)


def _value(side: Side, statement: str) -> int:
    return side.database.execute(statement).fetchone()[0]


def _watch(sides: list[Side], tasks: Callable[[Side], int], count: int) -> list[Reading]:
    """Return what each side has done between the first and the last sample at which both worked."""
    while not all(tasks(side) > 0 for side in sides):
        time.sleep(PAUSE / 10)
    first = last = now = [side.read(tasks) for side in sides]
    while all(reading.tasks < count * END for reading in now):
        last = now
        time.sleep(PAUSE)
        now = [side.read(tasks) for side in sides]
    for side in sides:
        side.stop()
    if last is first:
        sys.exit("The round was over before it could be measured. Give it more --tasks.")
    pairs = zip(first, last, strict=True)
    return [Reading(b.tasks - a.tasks, b.client - a.client, b.server - a.server) for a, b in pairs]


MEASUREMENTS: dict[str, tuple[Callable[[list[Side], int], list[Reading]], int]] = {
    "drain": (drain, 300_000),
    "enqueue": (enqueue, 5_000),
}


def main() -> None:
    """Print the ratios of each round and their medians: this checkout to the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurement", choices=MEASUREMENTS)
    parser.add_argument("other", type=Path, help="The folder of the other checkout.")
    parser.add_argument("--rounds", type=int, default=16, help="How often (default: %(default)s).")
    parser.add_argument("--tasks", type=int, help="How many (default: 300,000 to drain, 5,000 to enqueue).")
    options = parser.parse_args()
    measure, count = MEASUREMENTS[options.measurement]
    ratios: list[dict[str, Any]] = []
    with PrivatePostgres(durable=True) as server:
        admin = psycopg.connect(host=str(server.folder), user="postgres", dbname="postgres", autocommit=True)
        this, other = Side("this", ROOT, server, admin), Side("other", options.other.resolve(), server, admin)
        for number in range(options.rounds):
            order = [this, other] if number % 2 else [other, this]
            done = dict(zip((side.name for side in order), measure(order, options.tasks or count), strict=True))
            a, b = done["this"], done["other"]
            ratios.append(
                {
                    "rate": a.tasks / b.tasks,
                    "client's CPU a task": a.client / a.tasks * b.tasks / b.client,
                    "server's CPU a task": a.server / a.tasks * b.tasks / b.server,
                }
            )
            print(f"round {number + 1}: " + ", ".join(f"{name} {value:.3f}" for name, value in ratios[-1].items()))
        admin.close()
    for name in ratios[0]:
        values = [each[name] for each in ratios]
        print(f"{name}: median {statistics.median(values):.3f}, from {min(values):.3f} to {max(values):.3f}")


if __name__ == "__main__":
    main()
