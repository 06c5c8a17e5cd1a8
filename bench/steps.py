"""Measure steps, events, fan-in and atomic groups, beside DBOS and django-absurd, and print a table in Markdown.

    python bench/steps.py ten [--rounds N] [--tasks N]

The ways are those of ``bench/tasks.py``. CPU is that of all processes of the worker, and of all of the server, between
the first and the last task that are seen to end. It depends little on what else the machine does.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import tasks
from bench.contestants.base import Contestant, Failed
from bench.rounds import OURS, Bench
from bench.tables import verdict
from bench.testbed import cpu, resident, settle_down

DBOS, ABSURD = "DBOS", "django-absurd"
#: The atomic tasks, each with one INSERT: the function, and the threads of the worker.
ATOMIC = {
    "a no-op, 4 threads": ("nothing", 4),
    "`atomic`, 1 thread": ("insert", 1),
    "`atomic`, 4 threads": ("insert", 4),
    "`atomic`, 16 threads": ("insert", 16),
    "without waiting, 1 thread": ("insert_unsynced", 1),
    "without waiting, 4 threads": ("insert_unsynced", 4),
    "without waiting, 16 threads": ("insert_unsynced", 16),
    "grouped, 4 threads": ("insert_grouped", 4),
}
#: Sleeping tasks of django-absurd: copies of the rows of one.
COPY_ABSURD = """
WITH ids AS (SELECT gen_random_uuid() AS task_id, gen_random_uuid() AS run_id FROM generate_series(1, %s)),
runs AS (INSERT INTO absurd.r_default SELECT (jsonb_populate_record(row, to_jsonb(ids))).* FROM absurd.r_default AS row, ids),
naps AS (INSERT INTO absurd.c_default SELECT (jsonb_populate_record(row, jsonb_build_object(
    'task_id', task_id, 'owner_run_id', run_id))).* FROM absurd.c_default AS row, ids)
INSERT INTO absurd.t_default SELECT (jsonb_populate_record(row, jsonb_build_object(
    'task_id', task_id, 'last_attempt_run', run_id))).* FROM absurd.t_default AS row, ids
"""


def costs(bench: Bench, contestant: Contestant, count: int, function: str, *options: str) -> list[float]:
    """Return tasks a second, and milliseconds of the worker's CPU and of the server's for each task."""
    looks: list[list[float]] = []
    with (
        bench.testbed.filled(contestant, count, function) as database,
        bench.testbed.worker(contestant, *options) as process,
    ):

        def look() -> bool:
            left = contestant.left(database, function)
            if 0 < left < count and (not looks or left < looks[-1][0]):
                looks.append([left, time.perf_counter(), cpu(process.pid), bench.testbed.server_cpu()])
            return left == 0

        bench.testbed.until(look)
    if len(looks) < 2 or (done := looks[0][0] - looks[-1][0]) < count / 2:
        raise Failed(f"too few of {count:,} tasks were seen to end; give it more --tasks")
    seconds, client, server = (end - begin for begin, end in zip(looks[0][1:], looks[-1][1:], strict=True))
    return [done / seconds, 1000 * client / done, 1000 * server / done]


def medians(rounds: list[Any]) -> list[float]:
    """Return the median of each figure."""
    return [statistics.median(figures) for figures in zip(*rounds, strict=True)]


def ten(bench: Bench) -> list[Sequence[str]]:
    """Run tasks of ten steps by one process, of four threads where that can be said (1,000; others get fewer)."""
    cases = {
        each.name: partial(costs, bench, each, bench.tasks // (1 if each.name == OURS else 10), "ten_steps", *options)
        for each in bench.enter((OURS, DBOS, ABSURD))
        for options in [each.at_once(4) if each.name != DBOS else []]
    }
    found = {name: medians(rounds) for name, rounds in bench.measure(cases).items()}
    heading = ("contestant", "tasks a second", "ours is … times as fast", "client, ms CPU", "server, ms CPU", "aim")
    rows: list[Sequence[str]] = [heading]
    for name, (rate, client, server) in found.items():
        times = found[OURS][0] / rate if OURS in found else 0
        aim = verdict(client + server <= 4, "at most 4 ms") if name == OURS else verdict(times >= 3, "at least 3")
        rows.append((name, f"{rate:,.0f}", f"{times:.1f}", f"{client:.2f}", f"{server:.2f}", aim))
    return rows


def record(bench: Bench) -> list[Sequence[str]]:
    """The cost of one record, and of an atomic step with one INSERT beside its transaction alone (1,000 of each)."""

    def measure() -> dict[str, list[float]]:
        bench.testbed.fresh(bench.ours).close()
        return json.loads(bench.testbed.call(bench.ours, "records", str(bench.tasks)))

    bench.enter((OURS,))
    rounds = bench.measure({"records": measure})["records"]
    rows: list[Sequence[str]] = [("case", "µs", "client, µs CPU", "server, µs CPU", "aim")]
    found = {kind: medians([each[kind] for each in rounds]) for kind in rounds[0]}
    for kind, values in found.items():
        aim = ""
        if kind == "a record, not waiting for the disk":
            aim = verdict(sum(values[1:]) <= 250, "at most 250 µs CPU")
        elif kind == "an atomic step, waiting for the disk":
            share = values[0] / found[f"its transaction and an empty message, {kind.partition(', ')[2]}"][0]
            aim = f"{share:.2f} of its transaction; {verdict(share <= 1.15, 'at most 1.15')}"
        rows.append((kind, *(f"{value:,.0f}" for value in values), aim))
    return rows


def emit(bench: Bench) -> list[Sequence[str]]:
    """Time from before an emit to the continuation of the task that waits; random pauses (200 a round)."""

    def measure() -> list[float]:
        with bench.testbed.fresh(bench.ours), bench.testbed.worker(bench.ours):
            bench.testbed.call(bench.ours, "emits", str(bench.tasks))
            bench.testbed.until(lambda: len(bench.testbed.stamps.read_text().splitlines()) >= bench.tasks)
            return [1000 * float(line) for line in bench.testbed.stamps.read_text().splitlines()]

    bench.enter((OURS,))
    rounds = bench.measure({"emit": measure})["emit"]
    p50, p95 = (statistics.median(statistics.quantiles(each, n=20)[at] for each in rounds) for at in (9, 18))
    aim = verdict(p50 <= 5 and p95 <= 20, "at most 5 and 20")
    return [("case", "p50, ms", "p95, ms", "aim"), ("emit", f"{p50:.1f}", f"{p95:.1f}", aim)]


def fan_in(bench: Bench) -> list[Sequence[str]]:
    """Run a task that gathers so many children, all of it counted (1,000)."""

    def measure(contestant: Contestant) -> list[float]:
        options = ["--threads", "4"] if contestant is bench.ours else []
        with (
            bench.testbed.fresh(contestant),
            bench.testbed.counting() as wire,
            bench.testbed.worker(contestant, *options) as worker,
        ):
            bench.testbed.call(contestant, "many", "1", "stamp", str(time.time()))
            bench.testbed.until(lambda: bench.testbed.stamps.read_text())
            before = wire.round_trips, bench.testbed.server_cpu(), cpu(worker.pid), time.perf_counter()
            bench.testbed.call(contestant, "many", "1", "fan_in", str(bench.tasks))
            bench.testbed.until(lambda: bench.testbed.stamps.read_text().count("\n") > 1)
            after = wire.round_trips, bench.testbed.server_cpu(), cpu(worker.pid), time.perf_counter()
            trips, server, client, seconds = (end - begin for begin, end in zip(before, after, strict=True))
        continued = 1000 * float(bench.testbed.stamps.read_text().split()[-1])
        return [trips / bench.tasks, 1000 * server / bench.tasks, 1000 * client / bench.tasks, seconds, continued]

    cases = {each.name: partial(measure, each) for each in bench.enter((OURS, DBOS))}
    rows: list[Sequence[str]] = [
        ("contestant", "messages a child", "server, ms CPU", "client, ms CPU", "seconds", "aim")
    ]
    for name, rounds in bench.measure(cases).items():
        trips, server, client, seconds, late = medians(rounds)
        is_met = trips <= 0.35 and server <= 0.3 and late <= 20
        aim = (
            f"{late:.0f} ms after the last child; {verdict(is_met, 'at most 0.35, 0.3 ms and 20 ms')}"
            if name == OURS
            else ""
        )
        rows.append((name, f"{trips:.2f}", f"{server:.2f}", f"{client:.2f}", f"{seconds:.1f}", aim))
    return rows


def suspended(bench: Bench) -> list[Sequence[str]]:
    """An idle worker beside suspended tasks, for 20 seconds, and the bytes of each (100,000)."""
    counted = "SELECT sum(xact_commit + xact_rollback)::int FROM pg_stat_database WHERE datname = %s"

    def measure(contestant: Contestant, count: int) -> list[float]:
        with bench.testbed.fresh(contestant) as database:
            if contestant is bench.ours:
                bench.testbed.call(contestant, "suspended", str(count))
            else:
                bench.testbed.call(contestant, "many", "1", "nap")
                with bench.testbed.worker(contestant):
                    asleep = "SELECT count(*) FROM absurd.t_default WHERE state = 'sleeping'"
                    bench.testbed.until(lambda: database.execute(asleep).fetchone()[0])
                database.execute(COPY_ABSURD, [count - 1])
            settle_down(database)
            size = database.execute(
                "SELECT sum(pg_total_relation_size(relid)) FROM pg_stat_user_tables WHERE n_live_tup >= %s", [count]
            ).fetchone()[0]
        with bench.testbed.worker(contestant) as process:
            time.sleep(15)
            before = cpu(process.pid), bench.testbed.server_cpu(), bench.testbed.value(counted, contestant.key)
            time.sleep(20)
            after = cpu(process.pid), bench.testbed.server_cpu(), bench.testbed.value(counted, contestant.key)
            idle = [(end - begin) / 20 for begin, end in zip(before, after, strict=True)]
            return [1000 * idle[0], 1000 * idle[1], idle[2], resident(process), float(size) / count]

    contestants = bench.enter((OURS, ABSURD))
    cases = {
        f"{each.name}, {count:,} suspended": partial(measure, each, count)
        for each in contestants
        for count in (1, bench.tasks)
    }
    heading = (
        "case",
        "client, ms CPU a second",
        "server, ms CPU a second",
        "transactions a second",
        "MB",
        "bytes each",
    )
    rows: list[Sequence[str]] = [heading]
    for name, rounds in bench.measure(cases).items():
        client, server, transactions, size, each = medians(rounds)
        bytes_each = "" if name.endswith(" 1 suspended") else f"{each:,.0f}"
        rows.append((name, f"{client:.1f}", f"{server:.1f}", f"{transactions:.2f}", f"{size:.0f}", bytes_each))
    return rows


def atomic(bench: Bench) -> list[Sequence[str]]:
    """Run atomic tasks with one INSERT: by threads, without waiting for the disk, and grouped (2,000; some get more)."""
    bench.enter((OURS,))
    factor = {"nothing": 100, "insert_grouped": 25}
    cases = {
        name: partial(
            costs, bench, bench.ours, bench.tasks * factor.get(function, 1), function, "--threads", str(count)
        )
        for name, (function, count) in ATOMIC.items()
    }
    found = {name: medians(rounds) for name, rounds in bench.measure(cases).items()}
    one, plain, waits = found["`atomic`, 1 thread"], found["a no-op, 4 threads"], 1000 * sync_time()
    heading = ("case", "tasks a second", "of `atomic`, 1 thread", "client, ms CPU", "server, ms CPU", "aim")
    rows: list[Sequence[str]] = [heading]
    for name, (rate, client, server) in found.items():
        aim = verdict(rate >= 4 * one[0], "at least 4 times") if name == "without waiting, 1 thread" else ""
        if name.startswith("grouped"):
            fewer = sum(one[1:]) / (client + server)
            aim = f"{fewer:.0f} times less CPU; {verdict(fewer >= 20 and client + server <= sum(plain[1:]), 'at least 20, and at most a no-op')}"
        rows.append((name, f"{rate:,.0f}", f"{rate / one[0]:.1f}", f"{client:.3f}", f"{server:.3f}", aim))
    rows.append(("one fdatasync of this disk", f"{waits:.1f} ms", "", "", "", ""))
    return rows


def sync_time() -> float:
    """Return the median seconds in which the disk of the temporary files writes a page."""
    with open("/var/tmp/bench-sync" if os.path.isdir("/var/tmp") else "bench-sync", "wb") as file:
        os.unlink(file.name)
        taken = []
        for _ in range(100):
            os.pwrite(file.fileno(), os.urandom(8192), 0)
            began = time.perf_counter()
            os.fdatasync(file.fileno())
            taken.append(time.perf_counter() - began)
    return statistics.median(taken)


MEASUREMENTS: tasks.Measurements = {
    "ten": (ten, 1_000, 5),
    "record": (record, 1_000, 5),
    "emit": (emit, 200, 3),
    "fan_in": (fan_in, 1_000, 3),
    "suspended": (suspended, 100_000, 1),
    "atomic": (atomic, 2_000, 5),
}

if __name__ == "__main__":
    tasks.main(MEASUREMENTS, __doc__)
