"""Migrations of a table of many tasks while tasks are enqueued, claimed and settled: how long does anybody wait?

    .venv/bin/python bench/migrations.py [--tasks 1000000]
    .venv/bin/python bench/migrations.py --url postgres://…

The tables are migrated as a later version may do it, by the migrations of ``tests/sample/online_migrations``, and
back again. Meanwhile one session enqueues single tasks, one claims and settles ten at a time, and one keeps
transactions open for three seconds in which it has enqueued a task. The statements are plain SQL, as workers of this
version send. The database is a private PostgreSQL with fsync on, or the one that ``--url`` names, which is filled if it
has no tasks. Do not name a database that you need.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import date
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.incident import fill, prepare
from bench.tables import print_table
from example_project.postgres import PrivatePostgres

APP, LATER = "django_pglock", "tests.sample.online_migrations"
#: Seconds without a migration, for comparison, and seconds for which a transaction stays open.
ALONE, OPEN = 20.0, 3.0
QUEUE = "beside migrations"
ENQUEUE = "INSERT INTO django_pglock_task (queue, backend, task_path) VALUES (%s, 'default', 'x')"
CLAIM = """
UPDATE django_pglock_task SET status = 'RUNNING', worker = gen_random_uuid(), attempts = attempts + 1,
    last_attempted_at = clock_timestamp()
WHERE id = ANY (ARRAY(SELECT id FROM django_pglock_task WHERE status = 'READY' AND fair_key IS NULL AND queue = %s
                      ORDER BY queue, priority DESC, id LIMIT 10 FOR NO KEY UPDATE SKIP LOCKED))
RETURNING id
"""
SETTLE = "UPDATE django_pglock_task SET status = 'FAILED', finished_at = clock_timestamp() WHERE id = ANY (%s)"
ATTEMPTS = """
INSERT INTO django_pglock_attempt (task_id, number, started_at, finished_at, outcome, exception_path, traceback)
SELECT id, 1, clock_timestamp(), clock_timestamp(), 'FAILED', 'x', 'x' FROM unnest(%s) AS id
"""


class Beside:
    """The statements that run beside a migration, and the milliseconds that each has taken."""

    def __init__(self) -> None:
        self.took: dict[str, list[float]] = {"enqueue": [], "claim": [], "settle": []}
        self._is_over = threading.Event()

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Enqueue, claim and settle until the end of the block."""
        threads = [threading.Thread(target=each) for each in (self._enqueue, self._work, self._keep_open)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            for thread in threads:
                thread.join()

    def _timed(self, name: str, *statements: tuple[str, list[object]]) -> list[int]:
        from django.db import connection, transaction

        began = time.perf_counter()
        with transaction.atomic(), connection.cursor() as cursor:
            for sql, values in statements:
                cursor.execute(sql, values)
            ids = [row[0] for row in cursor.fetchall()] if cursor.description else []
        self.took[name].append(1000 * (time.perf_counter() - began))
        return ids

    def _enqueue(self) -> None:
        while not self._is_over.wait(0.005):
            self._timed("enqueue", (ENQUEUE, [QUEUE]))

    def _work(self) -> None:
        while not self._is_over.wait(0.005):
            if ids := self._timed("claim", (CLAIM, [QUEUE])):
                self._timed("settle", (ATTEMPTS, [ids]), (SETTLE, [ids]))

    def _keep_open(self) -> None:
        from django.db import connection, transaction

        while not self._is_over.wait(1.0):
            with transaction.atomic(), connection.cursor() as cursor:
                cursor.execute(ENQUEUE, [QUEUE])
                self._is_over.wait(OPEN)


def migrate_to(name: str) -> None:
    """Apply or unapply migrations until this one is the last."""
    from django.db import connection
    from django.db.migrations.executor import MigrationExecutor

    MigrationExecutor(connection).migrate([(APP, name)])


def phases(last: str) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table: nothing, each migration after the last of today, each back."""
    from django.db import connection
    from django.db.migrations.loader import MigrationLoader

    names = sorted(name for app, name in MigrationLoader(connection).graph.nodes if app == APP)
    names = names[names.index(last) :]
    yield (
        "migration",
        "s",
        "enqueued",
        *(f"{what}, median and longest, ms" for what in ("enqueue", "claim", "settle")),
    )
    yield measured("none", None)
    for name in names[1:]:
        yield measured(name, name)
    for before, name in zip(names[-2::-1], names[:0:-1], strict=True):
        yield measured(f"{name}, back", before)


def measured(title: str, target: str | None) -> tuple[str, ...]:
    """Migrate to the target, or do nothing for a while, and return a row of the table."""
    beside = Beside()
    with beside.going_on():
        time.sleep(1.5 if target else ALONE)  # a transaction is open
        began = time.perf_counter()
        if target:
            migrate_to(target)
        seconds = time.perf_counter() - began if target else ALONE
    texts = [f"{statistics.median(took):.1f} · {max(took):.0f}" if took else "-" for took in beside.took.values()]
    return title, f"{seconds:.1f}", f"{len(beside.took['enqueue']):,}", *texts


def main() -> None:
    """Fill, migrate and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=1_000_000, help="Number of tasks (default: 1,000,000).")
    parser.add_argument("--url", help="A database instead of a private PostgreSQL.")
    options = parser.parse_args()
    settings = {"shared_buffers": "1GB", "max_wal_size": "8GB", "maintenance_work_mem": "256MB"}
    with nullcontext() if options.url else PrivatePostgres(durable=True, settings=settings) as server:
        prepare(options.url or server.url)
        fill(options.tasks)
        from django.conf import settings as of_django
        from django.db import connection

        of_django.MIGRATION_MODULES = {APP: LATER}
        last = import_module(LATER).LAST
        try:
            print(f"{date.today():%d %B %Y}.\n")
            print_table([*phases(last)], {})
        finally:
            migrate_to(last)
            with connection.cursor() as cursor:
                cursor.execute("DELETE FROM django_pglock_attempt WHERE exception_path = 'x'")
                cursor.execute("DELETE FROM django_pglock_task WHERE queue = %s", [QUEUE])


if __name__ == "__main__":
    main()
