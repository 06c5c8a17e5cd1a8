"""Drain no-op tasks with one worker process and with a raw psycopg loop, in turn, and print the ratio.

    python bench/drain.py [--tasks 30000] [--rounds 5] [--threads 4]

Both work on the same durable private PostgreSQL: fsync and synchronous_commit are on. The raw loop is about the limit
of what a queue in Python could do: it claims 500 rows and settles them, one statement each, and runs nothing.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
import uuid
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from example_project.postgres import PrivatePostgres

FILL = """
TRUNCATE django_pglock_task, django_pglock_attempt, django_pglock_waiter;
INSERT INTO django_pglock_task (queue, backend, task_path)
SELECT 'default', 'default', 'tests.sample.tasks.nothing' FROM generate_series(1, %s)
"""
CLAIM = """
WITH claimed AS MATERIALIZED (
    SELECT id FROM django_pglock_task WHERE status = 'READY' AND queue = 'default'
    ORDER BY priority DESC, id LIMIT 500 FOR UPDATE SKIP LOCKED)
UPDATE django_pglock_task AS t SET status = 'RUNNING', attempts = attempts + 1, worker = %s, last_attempted_at = now()
FROM claimed WHERE t.id = claimed.id RETURNING t.id, t.attempts, t.args, t.kwargs
"""
SETTLE = """
UPDATE django_pglock_task AS t SET status = 'SUCCESSFUL', finished_at = now()
FROM unnest(%s::bigint[], %s::int[]) AS o (id, attempt)
WHERE t.id = o.id AND t.attempts = o.attempt AND t.status = 'RUNNING'
"""


def raw_loop(threads: int) -> float:
    """Return the seconds that the raw loop takes."""
    from django.db import connection

    me = uuid.uuid4()
    began = time.perf_counter()
    with connection.connection.cursor() as cursor:
        while rows := cursor.execute(CLAIM, (me,)).fetchall():
            cursor.execute(SETTLE, ([row[0] for row in rows], [row[1] for row in rows]))
    return time.perf_counter() - began


def worker(threads: int) -> float:
    """Return the seconds that one worker takes, its start included."""
    from django_pglock.models import Task
    from django_pglock.worker import Worker
    from django_pglock.worker.logs import silence_what_nobody_hears

    silence_what_nobody_hears()  # as the command does
    began = time.perf_counter()
    running = Worker(threads=threads)
    running.start()
    while Task.objects.filter(status="READY").exists() or Task.objects.filter(status="RUNNING").exists():
        time.sleep(0.01)
    seconds = time.perf_counter() - began
    running.shutdown()
    return seconds


def measure(tasks: int, rounds: int, threads: int) -> dict[str, float]:
    """Return the median rate of each contestant, in tasks a second; their order is drawn anew in each round."""
    from django.db import connection

    contestants = {"raw loop": raw_loop, "worker": worker}
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name in random.sample(sorted(contestants), len(contestants)):
            with connection.cursor() as cursor:
                for statement in FILL.split(";"):
                    cursor.execute(statement, [tasks] if "%s" in statement else None)
                cursor.execute("VACUUM ANALYZE django_pglock_task")
            rates[name].append(tasks / contestants[name](threads))
    return {name: statistics.median(found) for name, found in rates.items()}


def main() -> None:
    """Set up, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=30_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=4)
    options = parser.parse_args()
    with PrivatePostgres(durable=True) as server:
        os.environ.update(DATABASE_URL=server.url, DJANGO_SETTINGS_MODULE="tests.settings")
        import django

        django.setup()
        from django.core.management import call_command

        call_command("migrate", verbosity=0, run_syncdb=True)
        rates = measure(options.tasks, options.rounds, options.threads)
    for name, rate in rates.items():
        print(f"{name:10} {rate:>9,.0f} tasks/s  {rate / rates['raw loop']:5.2f} of the raw loop")


if __name__ == "__main__":
    main()
