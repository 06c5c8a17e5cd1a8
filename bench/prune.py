"""Pruning under load: whether it keeps up with what finishes, and what it costs the claims.

    .venv/bin/python bench/prune.py                             5,000,000 old rows, 20 minutes a run: an hour in all
    .venv/bin/python bench/prune.py --rows 500000 --seconds 60  to try it

There are two runs on copies of one database, without pruning and with it. In each, the table has old finished rows, and
tasks that do nothing come in at a rate. One worker runs them and, in the second run, deletes finished tasks that are
older than a minute: first all old rows, then what comes in. Ten times a second, another session claims ten tasks of a
queue that nobody serves, as a worker does, and rolls back. The claims say what pruning costs others: by the clock, and
by the CPU of the server's process, which a busy machine disturbs little. All ratios are those of the second run to the
first one. Sizes are those of the table and of its indexes when the run began, at most, and when it ended.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import date
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.incident import server_time
from bench.tables import print_table, verdict
from example_project.postgres import PrivatePostgres

ROOT = Path(__file__).resolve().parent.parent
PATH = "bench.app.tasks.nothing"
#: The aims: rows a second that are pruned while there are old ones, and how much slower a claim may be.
PRUNED, SLOWER = 20_000, 1.05
#: Seconds between two batches of new tasks, between two claims, and between two queries of the sizes.
BATCH, CLAIM, LOOK = 0.05, 0.1, 1.0
#: Tasks that a claim takes.
CLAIMED = 10

OLD = """
INSERT INTO django_pglock_task (status, queue, task_path, args, backend, attempts, worker, enqueued_at, started_at,
    last_attempted_at, finished_at, result)
SELECT 'SUCCESSFUL', 'queue-' || n %% 20, %s, jsonb_build_array(n), 'default', 1, gen_random_uuid(), moment, moment,
    moment, moment + interval '0.2 s', '{"sent": true}'
FROM (SELECT n, now() - interval '30 days' + n * interval '1 ms' AS moment FROM generate_series(1, %s) AS n) AS dated
"""
NEW = """
INSERT INTO django_pglock_task (queue, backend, task_path) SELECT %s, 'default', %s FROM generate_series(1, %s)
"""
WAITS = """
SELECT percentile_cont(ARRAY[0.5, 0.95]) WITHIN GROUP (ORDER BY extract(epoch FROM last_attempted_at - enqueued_at))
FROM (SELECT last_attempted_at, enqueued_at FROM django_pglock_task
      WHERE id > %s AND status = 'SUCCESSFUL' ORDER BY id DESC LIMIT 100000) AS newest
"""
SIZES = "SELECT pg_table_size('django_pglock_task'), pg_indexes_size('django_pglock_task')"
VACUUMS = "SELECT autovacuum_count, n_dead_tup FROM pg_stat_user_tables WHERE relname = 'django_pglock_task'"


def environment(server: PrivatePostgres, database: str, **pglock: Any) -> dict[str, str]:
    """Return the environment of the project of the benchmarks."""
    return {
        **os.environ,
        "PGHOST": str(server.folder),
        "PGUSER": "postgres",
        "PGDATABASE": database,
        "PYTHONPATH": str(ROOT),
        "BENCH_CONTESTANT": "ours",
        "BENCH_PGLOCK": json.dumps(pglock),
        "DJANGO_SETTINGS_MODULE": "bench.app.settings",
    }


def prepare(server: PrivatePostgres, rows: int) -> None:
    """Make the database of which each run has a copy."""
    connection = psycopg.connect(host=str(server.folder), user="postgres", dbname="postgres", autocommit=True)
    connection.execute("CREATE DATABASE filled")
    subprocess.run(
        [sys.executable, "-m", "django", "migrate", "--verbosity", "0"], env=environment(server, "filled"), check=True
    )
    with psycopg.connect(host=str(server.folder), user="postgres", dbname="filled", autocommit=True) as filled:
        filled.execute(OLD, (PATH, rows))
        filled.execute(NEW, ("probe", PATH, 1000))
        filled.execute("VACUUM ANALYZE")
        filled.execute("CHECKPOINT")
    for name in ("without", "pruning"):
        connection.execute(f"CREATE DATABASE {name} TEMPLATE filled")
    connection.close()


def measure(server: PrivatePostgres, database: str, rate: int, seconds: float) -> dict[str, Any]:
    """Run a worker in one database, in a process of its own for Django's settings. Return what was seen."""
    days = 1 / 1440 if database == "pruning" else None
    values = environment(server, database, PRUNE_AFTER={"SUCCESSFUL": days})
    words = [sys.executable, __file__, "--one", "--rate", str(rate), "--seconds", str(seconds)]
    with subprocess.Popen(
        [sys.executable, "-m", "django", "runlockworker", "default", "--verbosity", "0"], env=values, cwd=ROOT
    ) as worker:
        try:
            seen = subprocess.run(words, env=values, cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True).stdout
        finally:
            worker.terminate()
    found: dict[str, Any] = json.loads(seen.splitlines()[-1])
    return found


def watch(rate: int, seconds: float) -> dict[str, Any]:
    """Enqueue, claim and look at the sizes for some seconds. Return the figures of this run."""
    import django

    django.setup()
    from django.db import connection

    from django_pglock.store.claim import claim_statement
    from django_pglock.store.statements import keep_plans

    def ask(statement: str, *values: Any) -> Any:
        with connection.cursor() as cursor:
            cursor.execute(statement, values)
            return cursor.fetchone()

    connection.ensure_connection()
    keep_plans(connection)
    [last_old] = ask("SELECT max(id) FROM django_pglock_task WHERE status = 'SUCCESSFUL' OR queue = 'probe'")
    [rows] = ask("SELECT count(*) FROM django_pglock_task WHERE status = 'SUCCESSFUL'")
    sizes, claims, pruned_in = [ask(SIZES)], [], None
    statement = claim_statement("default", worker=uuid4(), paths=[PATH])
    server, cpu = server_time(), cpu_of_server()
    with enqueueing(rate):
        began = time.monotonic()
        claim_time, looked_at = 0.0, began
        while (now := time.monotonic()) < began + seconds:
            before = time.perf_counter()
            with connection.cursor() as cursor:
                cursor.execute("BEGIN")
                assert len(statement.execute(CLAIMED, "probe")) == CLAIMED
                claims.append(time.perf_counter() - before)
                cursor.execute("ROLLBACK")
            claim_time = server_time() - server
            if now >= looked_at + LOOK:
                looked_at, outside = now, server_time()
                sizes.append(ask(SIZES))
                # The oldest old row, by the primary key.
                [first] = ask("SELECT min(id) FROM django_pglock_task WHERE queue <> 'probe' AND id <= %s", last_old)
                if first is None and pruned_in is None:
                    pruned_in = now - began
                left = first
                server += server_time() - outside
            time.sleep(max(0.0, CLAIM - (time.monotonic() - now)))
        took = time.monotonic() - began
    waits = ask(WAITS, last_old)[0] or [0, 0]
    vacuums, dead = ask(VACUUMS)
    [done] = ask("SELECT count(*) FROM django_pglock_task WHERE id > %s AND status = 'SUCCESSFUL'", last_old)
    deleted = rows if left is None else rows - (last_old - left)
    return {
        "pruned": deleted / (pruned_in or took) if deleted > 1 else 0,
        "claim": 1000 * statistics.median(claims),
        "claim_cpu": 1000 * claim_time / len(claims),
        "waits": [1000 * each for each in waits],
        "cpu": (cpu_of_server() - cpu) / took,
        "left": done,
        "vacuums": vacuums,
        "dead": dead,
        "sizes": [[f"{each[at] / 2**20:,.0f}" for each in (sizes[0], max(sizes), sizes[-1])] for at in (0, 1)],
    }


@contextmanager
def enqueueing(rate: int) -> Iterator[None]:
    """Enqueue tasks at a rate in a thread, as a program without Django would."""
    over = threading.Event()

    def enqueue() -> None:
        with psycopg.connect(autocommit=True) as connection:
            began, sent = time.monotonic(), 0
            while not over.wait(BATCH):
                due = int((time.monotonic() - began) * rate) - sent
                connection.execute(NEW, ("default", PATH, due))
                sent += due

    thread = threading.Thread(target=enqueue)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def cpu_of_server() -> float:
    """Return the seconds of CPU of all processes of the server, also of those that have ended."""
    with psycopg.connect(autocommit=True) as connection:
        [(folder,)] = connection.execute("SHOW data_directory").fetchall()
    postmaster = int(Path(folder, "postmaster.pid").read_text().split()[0])
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[1]) == postmaster:
                ticks += int(fields[11]) + int(fields[12])
            elif path.parent.name == str(postmaster):
                ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def rows_of(without: dict[str, Any], pruning: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table: each figure without pruning and with it, the ratio, and the aim."""
    yield "figure", "without pruning", "with it", "ratio", "aim"
    rate = pruning["pruned"]
    yield "old rows pruned a second", "0", f"{rate:,.0f}", "", verdict(rate >= PRUNED, f"at least {PRUNED:,}")
    figures: dict[str, Callable[[dict[str, Any]], float]] = {
        f"a claim of {CLAIMED}, ms": lambda run: run["claim"],
        f"a claim of {CLAIMED}, server's CPU, ms": lambda run: run["claim_cpu"],
        "wait of new tasks, median, ms": lambda run: run["waits"][0],
        "wait of new tasks, 95 %, ms": lambda run: run["waits"][1],
        "server's CPU, cores": lambda run: run["cpu"],
    }
    for name, read in figures.items():
        ratio = read(pruning) / (read(without) or 1)
        aim = verdict(ratio <= SLOWER, f"at most {SLOWER:g}") if name.startswith("a claim") else ""
        yield name, f"{read(without):.2f}", f"{read(pruning):.2f}", f"{ratio:.2f}", aim
    for at, name in enumerate(("table", "indexes")):
        yield (
            f"{name}: at first, at most, at last, MiB",
            *(" / ".join(run["sizes"][at]) for run in (without, pruning)),
            "",
            "",
        )
    for key, name in (("left", "new finished rows at the end"), ("dead", "dead rows"), ("vacuums", "autovacuums")):
        yield name, f"{without[key]:,}", f"{pruning[key]:,}", "", ""


def main() -> None:
    """Fill, run twice and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=5_000_000, help="Old finished rows (default: 5,000,000).")
    parser.add_argument("--rate", type=int, default=2000, help="New tasks a second (default: 2,000).")
    parser.add_argument("--seconds", type=float, default=1200.0, help="Of each run (default: 1,200).")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(watch(options.rate, options.seconds)))
        return
    settings = {"shared_buffers": "1GB", "max_wal_size": "8GB", "maintenance_work_mem": "256MB"}
    with PrivatePostgres(durable=True, settings=settings) as server:
        prepare(server, options.rows)
        without, pruning = (measure(server, each, options.rate, options.seconds) for each in ("without", "pruning"))
    print(
        f"{date.today():%d %B %Y}, {options.rows:,} rows, {options.rate:,} tasks a second for {options.seconds:g} s.\n"
    )
    print_table([*rows_of(without, pruning)], {})


if __name__ == "__main__":
    main()
