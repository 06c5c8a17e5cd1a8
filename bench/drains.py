"""How fast a worker empties a full queue: of plain tasks, of tasks with keys, and beside what may slow it down."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from bench.contestants.base import Contestant
from bench.rounds import OURS, RAW, Bench, Case
from bench.tables import cost_table, rates_table, verdict

DRAIN_AIMS = {
    RAW: 0.7,
    "graphile-worker, batched": 1.5,
    "PgQueuer, batch 100": 3.0,
    "Celery with Redis": 25.0,
    "procrastinate": 50.0,
    "django-ox": 50.0,
    "django-tasks-db": 50.0,
}

#: The function of each case, and how many different keys its calls have; nothing: as many as calls.
KEYED = {
    "a lock key each": ("locked", 0),
    "100 lock keys": ("locked", 100),
    "unique": ("unique", 0),
    "fair over 100 keys": ("fair", 100),
}

KEYED_SHARES = {"unique": 0.8, "fair over 100 keys": 0.5}

KEYED_AIMS = {"graphile-worker, batched": 3, "procrastinate": 10}

FINISHED = """
INSERT INTO django_pglock_task (queue, backend, task_path, status, attempts, started_at, last_attempted_at, finished_at)
SELECT 'default', 'default', 'bench.app.tasks.nothing', 'SUCCESSFUL', 1, now(), now(), now()
FROM generate_series(1, 1000000)
"""


def drain(bench: Bench) -> list[Sequence[str]]:
    """Empty a full queue of no-op tasks with one worker process of default settings (200,000; slow ones get fewer)."""
    cases = {each.name: partial(drained, bench, each, bench.tasks // each.slowness) for each in bench.enter(())}
    return rates_table(bench.medians(cases), DRAIN_AIMS)


def drained(bench: Bench, contestant: Contestant, count: int, *options: str, function: str = "nothing") -> float:
    """Return the rate at which one worker empties a queue of ``count`` tasks."""
    what = [] if function == "nothing" else [function]
    with (
        bench.testbed.filled(contestant, count, *what) as database,
        bench.testbed.worker(contestant, *options),
    ):
        return bench.testbed.rate(contestant, database, count, function)


def atomic(bench: Bench) -> list[Sequence[str]]:
    """Empty a queue of atomic=True no-op tasks, against a raw loop with one transaction a task (10,000)."""
    bench.enter((OURS, RAW))
    ours = partial(drained, bench, bench.ours, bench.tasks, function="nothing_atomically")
    cases = {
        "atomic, 1 thread": partial(ours, "--threads", "1"),
        "atomic, 4 threads": partial(ours, "--threads", "4"),
        RAW: partial(drained, bench, bench.contestants[RAW], bench.tasks, "--one"),
    }
    rows: list[Sequence[str]] = [("contestant", "tasks a second", "of raw", "aim")]
    rates = bench.medians(cases)
    for (name, rate), aim in zip(rates.items(), (0.9, 2.0, 0.0), strict=False):
        of_raw = rate / rates.get(RAW, rate)
        rows.append((name, f"{rate:,.0f}", f"{of_raw:.2f}", verdict(of_raw >= aim, f"at least {aim}") if aim else ""))
    return rows


def keyed(bench: Bench) -> list[Sequence[str]]:
    """Empty a queue of no-op tasks with keys, against tasks without one and against others' locks (100,000)."""
    contestants = {each.name: each for each in bench.enter((OURS, *KEYED_AIMS))}
    cases: dict[str, Case] = {}
    for name, contestant in contestants.items():
        count = bench.tasks // contestant.slowness
        if contestant is bench.ours:
            cases[name] = partial(drained_by_key, bench, contestant, count, "numbered", count)
        else:
            cases[name] = partial(drained, bench, contestant, count)
        for what, (function, keys) in KEYED.items():
            if contestant is bench.ours or function == "locked":
                cases[f"{name}, {what}"] = partial(drained_by_key, bench, contestant, count, function, keys or count)
    rates = bench.medians(cases)
    rows: list[Sequence[str]] = [("contestant", "tasks a second", "of its own without a key", "aim")]
    for case, rate in rates.items():
        name, _, what = case.rpartition(", ") if case not in contestants else (case, "", "")
        share = rate / rates[name] if what and name in rates else 0
        least, ours = KEYED_SHARES.get(what, 0.0), rates.get(f"{OURS}, {what}")
        aim = verdict(share >= least, f"at least {least:g}") if name == OURS and least else ""
        if ours and name in KEYED_AIMS:
            aim = verdict(ours >= KEYED_AIMS[name] * rate, f"ours at least {KEYED_AIMS[name]} times as fast")
            aim = f"{ours / rate:.1f}; {aim}"
        rows.append((case, f"{rate:,.0f}", f"{share:.2f}" if share else "", aim))
    return rows


def drained_by_key(bench: Bench, contestant: Contestant, count: int, function: str, keys: int) -> float:
    """Return the rate at which one worker empties a queue of tasks with so many different keys."""
    with (
        bench.testbed.filled_by_key(contestant, count, function, keys) as database,
        bench.testbed.worker(contestant),
    ):
        return bench.testbed.rate(contestant, database, count, function if contestant is bench.ours else "nothing")


def history(bench: Bench) -> list[Sequence[str]]:
    """Empty a queue beside a million finished tasks, and without them (400,000)."""

    def measure() -> float:
        with bench.testbed.fresh(bench.ours) as database:
            database.execute(FINISHED)
            bench.testbed.fill(bench.ours, database, bench.tasks)
            with bench.testbed.worker(bench.ours):
                return bench.testbed.rate(bench.ours, database, bench.tasks)

    bench.enter((OURS,))
    return cost_table(bench, "beside a million finished tasks", measure, partial(drained, bench, bench.ours), 0.10)


def xmin(bench: Bench) -> list[Sequence[str]]:
    """Empty a queue while another session's old snapshot keeps all dead rows alive, and without it (150,000)."""

    def measure() -> float:
        with bench.testbed.filled(bench.ours, bench.tasks) as database, bench.testbed.connect(bench.ours.key) as other:
            other.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            other.execute("SELECT count(*) FROM django_pglock_worker")
            with bench.testbed.worker(bench.ours):
                return bench.testbed.rate(bench.ours, database, bench.tasks)

    bench.enter((OURS,))
    return cost_table(bench, "beside an open transaction", measure, partial(drained, bench, bench.ours), 0.35)


def keys(bench: Bench) -> list[Sequence[str]]:
    """Empty a queue beside 100,000 tasks that wait for one lock key, and without them (400,000).

    The key's holder sleeps, in one of the worker's threads, in both cases.
    """

    def measure(waiting: int, count: int) -> float:
        with bench.testbed.fresh(bench.ours) as database:
            bench.testbed.fill(bench.ours, database, 1 + waiting, "sleep_alone", "3600")
            bench.testbed.fill(bench.ours, database, count)
            with bench.testbed.worker(bench.ours):
                return bench.testbed.rate(bench.ours, database, count)

    bench.enter((OURS,))
    name = "beside 100,000 that wait for a key"
    return cost_table(bench, name, partial(measure, 100_000, bench.tasks), partial(measure, 0), 0.10)
