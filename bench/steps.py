"""Measure steps, events, fan-in and atomic groups, beside DBOS and django-absurd, and print a table in Markdown.

    python bench/steps.py ten [--rounds N] [--tasks N]

The ways are those of ``bench/tasks.py``. CPU is that of all processes of the worker, and of all of the server, in
milliseconds. It depends less than the time on what else the machine does.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from subprocess import Popen
from tempfile import TemporaryFile
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import tasks
from bench.contestants.base import Contestant, Failed
from bench.rounds import OURS, Bench, Case
from bench.tables import verdict
from bench.testbed import cpu, resident, settle_down

DBOS, ABSURD = "DBOS", "django-absurd"
#: Functions with one INSERT each, the number of calls for each of ``--tasks``, and the threads that run them.
ATOMIC = {
    "`atomic`": ("insert", 1, (1, 4, 16)),
    "`atomic`, not waiting for the disk": ("insert_unsynced", 1, (1, 4, 16)),
    "`atomic`, grouped": ("insert_grouped", 25, (1, 4)),
    "a no-op": ("nothing", 100, (4,)),
}
#: Makes tasks of django-absurd that sleep, like the one that is there.
COPY_ABSURD = """
WITH ids AS (SELECT gen_random_uuid() AS task_id, gen_random_uuid() AS run_id FROM generate_series(1, %s)), runs AS (
    INSERT INTO absurd.r_default
    SELECT (jsonb_populate_record(row, to_jsonb(ids))).* FROM absurd.r_default AS row, ids
), naps AS (
    INSERT INTO absurd.c_default
    SELECT (jsonb_populate_record(row, jsonb_build_object('task_id', ids.task_id, 'owner_run_id', ids.run_id))).*
    FROM absurd.c_default AS row, ids
)
INSERT INTO absurd.t_default
SELECT (jsonb_populate_record(row, jsonb_build_object('task_id', ids.task_id, 'last_attempt_run', ids.run_id))).*
FROM absurd.t_default AS row, ids
"""
TRANSACTIONS = "SELECT sum(xact_commit + xact_rollback)::int FROM pg_stat_database WHERE datname = %s"
SIZE = "SELECT sum(pg_total_relation_size(relid))::int FROM pg_stat_user_tables WHERE n_live_tup >= %s"

Aims = dict[str, Callable[[list[float]], str]]


def table(bench: Bench, cases: dict[str, Case], columns: dict[str, str], aims: Callable[[Any], Aims]) -> Any:
    """Measure cases and return the rows of a table. ``columns``: the format of each; ``aims`` gets the medians."""
    found = {name: list(map(statistics.median, zip(*each, strict=True))) for name, each in bench.measure(cases).items()}
    rows: list[Sequence[str]] = [("case", *columns, "aim")]
    for name, values in found.items():
        cells = [format(value, form) for value, form in zip(values, columns.values(), strict=True)]
        rows.append((name, *cells, aims(found).get(name, lambda _: "")(values)))
    return rows


def used(bench: Bench, worker: Popen[bytes]) -> list[float]:
    """Return the time, and the milliseconds of CPU that a worker and the server have used."""
    return [time.perf_counter(), 1000 * cpu(worker.pid), 1000 * bench.testbed.server_cpu()]


def since(begin: Sequence[float], end: Sequence[float]) -> list[float]:
    return [after - before for before, after in zip(begin, end, strict=True)]


def costs(bench: Bench, contestant: Contestant, count: int, function: str, *options: str) -> list[float]:
    """Return tasks a second, and the CPU of worker and server for each, from the first to the last end that is seen."""
    looks: list[list[float]] = []
    with (
        bench.testbed.filled(contestant, count, function) as database,
        bench.testbed.worker(contestant, *options) as worker,
    ):

        def look() -> bool:
            left = contestant.left(database, function)
            if 0 < left < count and (not looks or left < looks[-1][0]):
                looks.append([left, *used(bench, worker)])
            return left == 0

        bench.testbed.until(look)
    if len(looks) < 2 or (done := looks[0][0] - looks[-1][0]) < count / 4:
        raise Failed(f"too few of {count:,} tasks were seen to end; give it more --tasks")
    _, seconds, *each = since(looks[0], looks[-1])
    return [done / seconds, *(value / done for value in each)]


def ten(bench: Bench) -> list[Sequence[str]]:
    """Run tasks of ten steps by one process, with four threads where that can be said (1,000; others get a quarter)."""
    cases: dict[str, Case] = {}
    for each in bench.enter((OURS, DBOS, ABSURD)):
        count, options = (bench.tasks if each.name == OURS else bench.tasks // 4), each.at_once(4)
        cases[each.name] = partial(costs, bench, each, count, "ten_steps", *(options if each.name != DBOS else []))

    def aims(found: dict[str, list[float]]) -> Aims:
        def times(values: list[float]) -> str:
            ratio = found[OURS][0] / values[0]
            return f"ours is {ratio:.1f} times as fast; {verdict(ratio >= 3, 'at least 3')}"

        return {OURS: lambda values: verdict(sum(values[1:]) <= 4, "at most 4 ms CPU"), DBOS: times, ABSURD: times}

    return table(bench, cases, {"tasks a second": ",.0f", "worker, ms CPU": ".2f", "server, ms CPU": ".2f"}, aims)


def record(bench: Bench) -> list[Sequence[str]]:
    """The microseconds of a record, and of an atomic step beside its transaction alone (1,000 of each)."""
    bench.enter((OURS,))
    kinds = ("a record", "an atomic step", "its transaction and an empty message")
    rounds: list[dict[str, list[float]]] = []

    def measure(name: str) -> list[float]:
        # All kinds are measured in one process, and asked for one after the other.
        if not rounds or name not in rounds[-1]:
            bench.testbed.fresh(bench.ours).close()
            rounds.append(json.loads(bench.testbed.call(bench.ours, "records", str(bench.tasks))))
        return rounds[-1].pop(name)

    def aims(found: dict[str, list[float]]) -> Aims:
        def share(values: list[float]) -> str:
            ratio = values[0] / found[f"{kinds[2]}, waiting for the disk"][0]
            return f"{ratio:.2f} of its transaction; {verdict(ratio <= 1.15, 'at most 1.15')}"

        return {
            f"{kinds[0]}, not waiting for the disk": lambda values: verdict(
                sum(values[1:]) <= 250, "at most 250 µs CPU"
            ),
            f"{kinds[1]}, waiting for the disk": share,
        }

    names = [f"{kind}, {how} for the disk" for how in ("waiting", "not waiting") for kind in kinds]
    columns = {"µs": ",.0f", "client, µs CPU": ".0f", "server, µs CPU": ".0f"}
    return table(bench, {name: partial(measure, name) for name in names}, columns, aims)


def emit(bench: Bench) -> list[Sequence[str]]:
    """Time from before an emit to the continuation of the task that waits; random pauses (200 a round)."""

    def measure(verb: str) -> list[float]:
        with bench.testbed.fresh(bench.ours), bench.testbed.worker(bench.ours):
            bench.testbed.call(bench.ours, verb, str(bench.tasks))
            stamps = bench.testbed.until(lambda: (found := bench.testbed.stamped())[bench.tasks - 1 :] and found)
            return [statistics.quantiles(stamps, n=20)[at] for at in (9, 18)]

    bench.enter((OURS,))
    aim: Aims = {"`emit()`": lambda values: verdict(values[0] <= 5 and values[1] <= 20, "at most 5 and 20")}
    cases = {"`emit()`": partial(measure, "emits"), "`enqueue()`, to compare": partial(measure, "stamps")}
    return table(bench, cases, {"p50, ms": ".1f", "p95, ms": ".1f"}, lambda _: aim)


def fan_in(bench: Bench) -> list[Sequence[str]]:
    """Run a task that gathers so many children: all of it, for each child (1,000)."""

    def gather(contestant: Contestant, trips: Callable[[], int]) -> list[float]:
        options = contestant.at_once(4) if contestant is bench.ours else []
        with bench.testbed.fresh(contestant), bench.testbed.worker(contestant, *options) as worker:
            bench.testbed.call(contestant, "many", "1", "stamp", str(time.time()))
            bench.testbed.until(bench.testbed.stamped)
            before = [trips(), *used(bench, worker)]
            bench.testbed.call(contestant, "many", "1", "fan_in", str(bench.tasks))
            late = bench.testbed.until(lambda: bench.testbed.stamped()[1:])[0]
            sent, seconds, *spent = since(before, [trips(), *used(bench, worker)])
        return [sent / bench.tasks, *(each / bench.tasks for each in spent), seconds, late]

    def measure(contestant: Contestant) -> list[float]:
        with bench.testbed.counting() as wire:
            sent = gather(contestant, lambda: wire.round_trips)[0]
        # Without the proxy, which takes longer than the server.
        return [sent, *gather(contestant, lambda: 0)[1:]]

    def aim(values: list[float]) -> str:
        is_met = values[0] <= 0.35 and values[2] <= 0.3 and values[4] <= 20
        return verdict(is_met, "at most 0.35, 0.3 ms of the server, and 20 ms")

    cases = {each.name: partial(measure, each) for each in bench.enter((OURS, DBOS))}
    columns = {"messages": ".2f", "worker, ms CPU": ".2f", "server, ms CPU": ".2f", "seconds in all": ".1f"}
    return table(bench, cases, {**columns, "ms after the last child": ".0f"}, lambda _: {OURS: aim})


def suspended(bench: Bench) -> list[Sequence[str]]:
    """An idle worker beside one and many suspended tasks, for 20 seconds: a second of it (100,000)."""

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
            size = database.execute(SIZE, [count]).fetchone()[0]
        with bench.testbed.worker(contestant) as worker:
            time.sleep(15)
            before = [*used(bench, worker), bench.testbed.value(TRANSACTIONS, contestant.key)]
            time.sleep(20)
            seconds, *spent = since(before, [*used(bench, worker), bench.testbed.value(TRANSACTIONS, contestant.key)])
            return [*(each / seconds for each in spent), resident(worker), size / count if count > 1 else 0]

    cases: dict[str, Case] = {}
    for each in bench.enter((OURS, ABSURD)):
        cases |= {f"{each.name}, {count:,}": partial(measure, each, count) for count in (1, bench.tasks)}
    aim = {f"{OURS}, {bench.tasks:,}": lambda values: verdict(values[-1] <= 700, "at most 700 bytes")}
    columns = {"worker, ms CPU": ".1f", "server, ms CPU": ".1f", "transactions": ".2f", "MB": ".0f"}
    return table(bench, cases, {**columns, "bytes each": ",.0f"}, lambda _: aim)


def atomic(bench: Bench) -> list[Sequence[str]]:
    """Run atomic tasks with one INSERT: by threads, without waiting for the disk, and grouped (2,000 and more)."""
    bench.enter((OURS,))
    print(f"One fdatasync of this disk takes {1000 * sync_time():.1f} ms.\n")
    cases: dict[str, Case] = {}
    for name, (function, factor, threads) in ATOMIC.items():
        for count in threads:
            run = partial(costs, bench, bench.ours, factor * bench.tasks, function, *bench.ours.at_once(count))
            cases[f"{name}, {count} thread{'s' * (count > 1)}"] = run

    def aims(found: dict[str, list[float]]) -> Aims:
        one, plain = found["`atomic`, 1 thread"], found["a no-op, 4 threads"]

        def grouped(values: list[float]) -> str:
            fewer, is_cheap = sum(one[1:]) / sum(values[1:]), sum(values[1:]) <= sum(plain[1:])
            return (
                f"{fewer:.0f} times less CPU; {verdict(fewer >= 20 and is_cheap, 'at least 20, and at most a no-op')}"
            )

        times = {name: lambda values: f"{values[0] / one[0]:.1f} times the rate of one thread" for name in cases}
        return {**times, "`atomic`, grouped, 4 threads": grouped}

    return table(bench, cases, {"tasks a second": ",.0f", "worker, ms CPU": ".3f", "server, ms CPU": ".3f"}, aims)


def sync_time() -> float:
    """Return the median of the seconds in which the disk writes a page."""
    taken = []
    with TemporaryFile(buffering=0) as file:
        for _ in range(100):
            file.write(os.urandom(8192))
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
