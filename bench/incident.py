"""The admin in an incident: what each page costs on a database of many tasks, and how long it takes to retry many.

    .venv/bin/python bench/incident.py [--tasks 1000000] [--only verbs]
    .venv/bin/python bench/incident.py --tasks 10000000
    .venv/bin/python bench/incident.py --url postgres://… --only pages

Of 10,000,000 tasks 150,000 have failed, 60,000 of them by one function within an hour, and 229,000 more are ready.
There are 220 queues and 300 functions. Other sizes have the same shares. The database is a private PostgreSQL with
fsync on, or the one that ``--url`` names, which is filled if it has no tasks. Pages are what EXPLAIN (ANALYZE, BUFFERS)
says of each statement. Times are CPU times, of the server's process and of the admin's, so that a busy machine disturbs
little; each is the median of several requests.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import date, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.tables import print_table
from example_project.postgres import PrivatePostgres

#: Tasks of each kind among ten million.
WHOLE = 10_000_000
SHARES = {"succeeded": 9_770_000, "failed": 90_000, "incident": 60_000, "ready": 229_000, "scheduled": 5_000}
QUEUES, FUNCTIONS, WORKERS, RUNNING = 220, 300, 40, 320
#: The queue and the function of the incident.
QUEUE, CHARGE = "payments", "shop.payments.charge"
#: Tasks of the bulk verbs, and requests of a page of which the median counts.
MANY, VISITS = 100_000, 5

# One kind of task, spread evenly over a range of the history: {first} and {last} are shares of it.
INSERT = """
INSERT INTO django_pglock_task (status, queue, task_path, args, kwargs, backend, attempts, worker, run_after,
    enqueued_at, started_at, last_attempted_at, finished_at, result, unique_key, unique_scope, fingerprint)
SELECT %(status)s, COALESCE(%(queue)s, 'queue-' || n %% {queues}),
    COALESCE(%(path)s, 'shop.jobs.f' || n %% {functions}),
    jsonb_build_array(n), '{{"email": "somebody@example.com"}}', 'default', (%(status)s <> 'READY')::int,
    CASE WHEN %(status)s = 'RUNNING'
         THEN (SELECT id FROM django_pglock_worker ORDER BY id OFFSET n %% {workers} LIMIT 1)
         WHEN %(is_done)s THEN gen_random_uuid() END,
    CASE WHEN %(status)s = 'SCHEDULED' THEN now() + n * interval '1 s' END,
    moment, begun, begun, CASE WHEN %(is_done)s THEN begun + interval '0.2 s' END,
    CASE WHEN %(status)s = 'SUCCESSFUL' THEN '{{"sent": true}}'::jsonb END,
    CASE WHEN %(status)s = 'FAILED' AND n %% 20 = 0 THEN 'order ' || n END,
    CASE WHEN %(status)s = 'FAILED' AND n %% 20 = 0 THEN 'UNFINISHED' END,
    CASE WHEN %(status)s = 'FAILED'
         THEN CASE WHEN %(path)s::text IS NULL THEN n %% {functions} ELSE {functions} END END
FROM (SELECT n, moment, CASE WHEN %(is_begun)s THEN moment + interval '1 s' END AS begun
      FROM (SELECT n, now() - interval '30 days'
                            * (1 - (%(first)s + (%(last)s - %(first)s) * n / %(count)s::float8)) AS moment
            FROM generate_series(1, %(count)s) AS n) AS numbered) AS dated
"""

ATTEMPTS = """
INSERT INTO django_pglock_attempt (task_id, number, worker, started_at, finished_at, outcome, exception_path, traceback)
SELECT id, 1, worker, started_at, finished_at, 'FAILED', 'builtins.ConnectionError',
       'Traceback (most recent call last):' || repeat(E'\\n  File "shop/bank.py", line 88, in charge', 12)
       || E'\\nConnectionError: the bank is away'
FROM django_pglock_task WHERE status = 'FAILED'
"""

STUBBORN = """
INSERT INTO django_pglock_attempt (task_id, number, started_at, finished_at, outcome, exception_path, traceback)
SELECT (SELECT max(id) FROM django_pglock_task WHERE status = 'FAILED'), n, now(), now(), 'FAILED',
       'builtins.ConnectionError', repeat('x', 60000)
FROM generate_series(2, 1000) AS n
"""

# What workers would have written: of all queues together and of each, three hours by the minute and a week by the hour.
HISTORY = """
INSERT INTO django_pglock_number (seconds, started_at, queue, task_path, kind, count, total, buckets)
SELECT kind.seconds, date_trunc(kind.unit, now()) - n * make_interval(secs => kind.seconds), queue, '',
    counted, 200, 100, array_fill(10, ARRAY[20])
FROM (VALUES (60, 'minute', 180), (3600, 'hour', 168)) AS kind (seconds, unit, count),
     generate_series(0, kind.count) AS n,
     (SELECT '' AS queue UNION ALL SELECT 'queue-' || q FROM generate_series(0, %(queues)s - 1) AS q) AS named,
     unnest(ARRAY['succeeded', 'failed', 'retried', 'waited', 'ran']) AS counted
"""

PAGES = {
    "overview": "overview/",
    "tasks": "task/",
    "tasks, FAILED": "task/?status__exact=FAILED",
    "tasks, READY": "task/?status__exact=READY",
    "tasks, RUNNING": "task/?status__exact=RUNNING",
    "tasks, SUCCESSFUL": "task/?status__exact=SUCCESSFUL",
    "tasks, FAILED, function of the incident": f"task/?status__exact=FAILED&task_path={CHARGE}",
    "tasks, FAILED, a rare function": "task/?status__exact=FAILED&task_path=shop.jobs.f7",
    "tasks, FAILED, queue of the incident": f"task/?status__exact=FAILED&queue={QUEUE}",
    "tasks, FAILED, queue and function of the incident": f"task/?status__exact=FAILED&queue={QUEUE}&task_path={CHARGE}",
    "tasks, FAILED, a rare queue": "task/?status__exact=FAILED&queue=queue-7",
    "tasks, FAILED, by exception": "task/?exception=builtins.ConnectionError",
    "tasks, a day": "task/?since={since}&before={before}",
    "tasks, FAILED, a function, a day": f"task/?status__exact=FAILED&task_path={CHARGE}&since={{since}}",
    "tasks, an argument": "task/?argument=email=somebody@example.com",
    "tasks, one queue": "task/?queue=queue-7",
    "tasks, one function": "task/?task_path=shop.jobs.f7",
    "tasks, stuck": "task/?attention=stuck",
    "a failed task": "task/{failed}/change/",
    "a task with 1,000 attempts": "task/{stubborn}/change/",
    "failures": "failuregroup/",
    "failures, no worker": "failuregroup/",
    "workers": "worker/",
    "queues": "queue/",
    "queues, no worker": "queue/",
    "schedules": "schedule/",
    "leases": "lease/",
    "locks": "advisorylock/",
}


def prepare(url: str) -> None:
    """Set Django up and create the tables."""
    os.environ["DATABASE_URL"] = url
    os.environ["DJANGO_SETTINGS_MODULE"] = "example_project.settings"
    import django
    from django.conf import settings

    django.setup()
    settings.ALLOWED_HOSTS, settings.DEBUG = ["*"], False
    from django.core.management import call_command

    call_command("migrate", verbosity=0)


def fill(tasks: int) -> None:
    """Write the tasks, the oldest first, so that ids and times have the same order. Not into a table that has some."""
    from django.db import connection

    from django_pglock.models import Task, Worker

    if Task.objects.exists():
        return
    about = {"hostname": "bench", "threads": 8, "queues": [], "task_paths": [CHARGE], "is_sleeping": True}
    workers = (Worker(id=uuid4(), parent=uuid4(), name=f"worker-{n}", pid=n, **about) for n in range(WORKERS))
    Worker.objects.bulk_create(workers)
    with connection.cursor() as cursor:
        for status, share, first, last, queue, path in rows_of(tasks):
            values = {"status": status, "count": share, "first": first, "last": last, "queue": queue, "path": path}
            is_done = status in ("SUCCESSFUL", "FAILED")
            values |= {"is_done": is_done, "is_begun": is_done or status == "RUNNING"}
            cursor.execute(INSERT.format(queues=QUEUES - 1, functions=FUNCTIONS - 1, workers=WORKERS), values)
        cursor.execute(ATTEMPTS)
        cursor.execute(STUBBORN)
        cursor.execute(HISTORY, {"queues": QUEUES - 1})
        cursor.execute("VACUUM ANALYZE")
        cursor.execute("CHECKPOINT")


def rows_of(tasks: int) -> Iterator[tuple[str, int, float, float, str | None, str | None]]:
    """Yield the kinds of tasks: status, number, the part of the history, queue and function."""
    count = {kind: max(1, share * tasks // WHOLE) for kind, share in SHARES.items()}
    # In ten parts, so that failed tasks lie among those that have succeeded.
    for part in range(10):
        first, last = part / 10, (part + 1) / 10
        yield "SUCCESSFUL", count["succeeded"] // 10, first, last, None, None
        yield "FAILED", count["failed"] // 10, first, last, None, None
    yield "FAILED", count["incident"], 0.998, 0.999, QUEUE, CHARGE
    yield "READY", count["ready"] // 2, 0.999, 1, QUEUE, CHARGE
    yield "READY", count["ready"] // 2, 0.999, 1, None, None
    yield "SCHEDULED", count["scheduled"], 0.999, 1, None, None
    yield "RUNNING", RUNNING, 1, 1, None, None


def visits() -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table of pages."""
    from django.contrib.auth.models import User
    from django.db.models.functions import Now
    from django.test import Client
    from django.urls import reverse

    from django_pglock.models import Attempt, Number, Task, Worker
    from django_pglock.store.numbers import count_depths

    client = Client()
    client.force_login(User.objects.create_superuser(f"visitor{time.time_ns()}"))
    failed = Task.objects.filter(status="FAILED").order_by("pk").values_list("pk", flat=True).first()
    stubborn = Attempt.objects.order_by("-pk").values_list("task_id", flat=True).first()
    root = reverse("admin:app_list", args=["django_pglock"])
    moments = {name: f"{date.today() - timedelta(days=days)}T00:00" for name, days in (("since", 2), ("before", 1))}
    # Half of the workers are alive for as long as this takes.
    Worker.objects.filter(pid__lt=WORKERS // 2).update(heartbeat_at=Now() + timedelta(days=1))
    yield "page", "statements", "pages touched", "server's CPU, ms", "admin's CPU, ms", "size, kB"
    for name, path in PAGES.items():
        address = root + path.format(failed=failed, stubborn=stubborn, **moments)
        # A worker counts for all pages, every 15 seconds.
        Number.objects.filter(kind="counted").update(total=0)
        if not name.endswith("no worker"):
            count_depths("default")
        client.get(address)  # fills caches
        seen = [visit(client, address) for _ in range(VISITS)]
        server, cpu, size = (statistics.median(each[at] for each in seen) for at in range(3))
        statements = seen[0][3]
        touched = sum(pages_touched(*each) for each in statements)
        yield name, str(len(statements)), f"{touched:,}", f"{server:.0f}", f"{cpu:.0f}", f"{size / 1000:,.0f}"


def visit(client: Any, address: str) -> tuple[float, float, int, list[tuple[str, Any]]]:
    """Open a page; return the ms of CPU of the server and of the admin, its size and its statements."""
    from django.db import connection

    statements: list[tuple[str, Any]] = []

    def note(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        statements.append((sql, params))
        return execute(sql, params, many, context)

    connection.ensure_connection()
    with connection.execute_wrapper(note):
        server, began = server_time(), time.process_time()
        answer = client.get(address)
        size = len(answer.content)
        used = time.process_time() - began
    assert answer.status_code == 200, (address, answer.status_code)
    return 1000 * (server_time() - server), 1000 * used, size, statements


def pages_touched(sql: str, params: Any) -> int:
    """Return how many pages of the database a statement touches."""
    from django.db import connection

    if not sql.lstrip("( \n").startswith(("SELECT", "WITH")):
        return 0
    with connection.cursor() as cursor:
        cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {sql}", params)
        plan = cursor.fetchone()[0][0]["Plan"]
    return int(plan["Shared Hit Blocks"]) + int(plan["Shared Read Blocks"])


def verbs() -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table of verbs: the failed tasks are retried, then cancelled, retried again and deleted."""
    from django_pglock.models import Task

    oldest = Task.objects.filter(status="FAILED").order_by("pk").values_list("pk", flat=True)[:MANY]
    ids = list(oldest)
    chosen = Task.objects.filter(pk__gte=ids[0], pk__lte=ids[-1])
    uses: dict[str, Callable[[], int]] = {
        "retry": lambda: chosen.filter(status="FAILED").retry(),
        "cancel": lambda: chosen.filter(status="READY").cancel(),
        "prune": lambda: chosen.prune(older_than=0, statuses=["CANCELLED"]),
    }
    yield "verb", "tasks", "statements", "s", "server's CPU, s"
    for name, use in uses.items():
        number, statements, seconds, server = timed(use)
        yield name, f"{number:,}", f"{statements:,}", f"{seconds:.1f}", f"{server:.1f}"


def timed(use: Callable[[], int]) -> tuple[int, int, float, float]:
    """Return what a verb returns, how many statements it sent, and its seconds: on the clock, of the server's CPU."""
    from django.db import connection

    sent = 0

    def note(execute: Any, *arguments: Any) -> Any:
        nonlocal sent
        sent += 1
        return execute(*arguments)

    connection.ensure_connection()
    with connection.execute_wrapper(note):
        server, began = server_time(), time.perf_counter()
        number = use()
        return number, sent, time.perf_counter() - began, server_time() - server


def server_time() -> float:
    """Return the seconds of CPU of the session's process; 0 if it is not on this machine."""
    from django.db import connection

    path = Path(f"/proc/{connection.connection.info.backend_pid}/schedstat")
    return int(path.read_text().split()[0]) / 1e9 if path.exists() else 0.0


def main() -> None:
    """Fill, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=1_000_000, help="Number of tasks (default: 1,000,000).")
    parser.add_argument("--only", choices=["pages", "verbs"], help="Measure only this.")
    parser.add_argument("--url", help="A database instead of a private PostgreSQL.")
    options = parser.parse_args()
    # A database of a real size has more memory than the private server of the tests.
    settings = {"shared_buffers": "1GB", "max_wal_size": "8GB", "maintenance_work_mem": "256MB"}
    with nullcontext() if options.url else PrivatePostgres(durable=True, settings=settings) as server:
        prepare(options.url or server.url)
        fill(options.tasks)
        print(f"{date.today():%d %B %Y}, {options.tasks:,} tasks.\n")
        for name, rows in (("pages", visits), ("verbs", verbs)):
            if options.only in (None, name):
                print_table([*rows()], {})
                print()


if __name__ == "__main__":
    main()
