"""Measure the task queue against others and against raw psycopg, all in one run, and print a table in Markdown.

    pip install -r bench/requirements.txt
    python bench/tasks.py drain [--only NAME ...] [--rounds N] [--tasks N]

What the others need is installed on first use into the folder ``.bench`` (or ``--cache``): virtual environments, node
modules, Redis. One that cannot be installed, or fails, stands in the table with the reason. All share one private
PostgreSQL with fsync and synchronous_commit on, each run has a fresh database, the order is drawn anew in each round,
and a figure is the median of all rounds. How the clock runs is said in ``bench/arena.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import psycopg

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import naps as nap_cases
from bench.arena import ROOT, Arena, resident, settle_down, threads
from bench.contestants import ALL
from bench.contestants.base import WARM_UP, Contestant, Failed

#: The name of what is measured, and how: returns one number, or several.
Case = Callable[[], Any]
OURS, RAW = "django_pglock", "raw psycopg"
#: Who takes part where tasks last a while.
SLEEPERS = ("procrastinate", "Celery with Redis", "Oban for Python", "graphile-worker, batched")
DRAIN_AIMS = {
    RAW: 0.7,
    "graphile-worker, batched": 1.5,
    "PgQueuer, batch 100": 3.0,
    "Celery with Redis": 25.0,
    "procrastinate": 50.0,
    "django-ox": 50.0,
    "django-tasks-db": 50.0,
}


class Bench:
    """One run of one subcommand: the contestants that take part, the rounds, and what came of them."""

    def __init__(self, arena: Arena, options: argparse.Namespace, stack: ExitStack) -> None:
        self.arena = arena
        self.rounds: int = options.rounds
        self.tasks: int = options.tasks
        self.failed: dict[str, str] = {}
        self.contestants: dict[str, Contestant] = {}
        self.cases: str = options.cases
        self._only: list[str] = options.only
        self._cache: Path = options.cache
        self._stack = stack

    @property
    def ours(self) -> Contestant:
        return self.contestants[OURS]

    def enter(self, names: Sequence[str]) -> list[Contestant]:
        """Install who is named (nobody: all), and return who is there; the others are noted with their reasons."""
        for kind in ALL:
            wanted = kind.name in (names or [kind.name])
            if wanted and any(word.lower() in kind.name.lower() for word in self._only or [kind.name]):
                self._install(kind(self._cache))
        return list(self.contestants.values())

    def _install(self, contestant: Contestant) -> None:
        print(f"installing {contestant.name}", file=sys.stderr)
        self._stack.callback(contestant.close)
        try:
            contestant.install()
        except Failed as error:
            self.failed[contestant.name] = str(error)
        else:
            self.contestants[contestant.name] = contestant

    def measure(self, cases: dict[str, Case]) -> dict[str, list[Any]]:
        """Return what each case came to in each round; a case that fails is noted and left out from then on."""
        found: dict[str, list[Any]] = {name: [] for name in cases}
        for number in range(1, self.rounds + 1):
            for name in random.sample(sorted(cases), len(cases)):
                if name in self.failed:
                    continue
                print(f"round {number}: {name}", end="", flush=True, file=sys.stderr)
                try:
                    found[name].append(cases[name]())
                    print(f" {found[name][-1]}"[:60], file=sys.stderr)
                except (Failed, psycopg.Error) as error:
                    self.failed[name] = str(error).splitlines()[0]
                    print(" failed", file=sys.stderr)
        return {name: values for name, values in found.items() if name not in self.failed}

    def medians(self, cases: dict[str, Case]) -> dict[str, float]:
        """Return the median of each case."""
        return {name: statistics.median(values) for name, values in self.measure(cases).items()}

    def heading(self) -> str:
        """Say when, on what and with what this was measured."""
        server = self.arena.value("SHOW server_version")
        versions = filter(None, (each.version() for each in self.contestants.values()))
        return (
            f"{date.today():%d %B %Y}, {os.cpu_count()} cores ({platform.machine()}), Python "
            f"{platform.python_version()}, PostgreSQL {server} with fsync on; {', '.join(versions)}; "
            f"medians of {self.rounds} rounds."
        )


# Tables


def verdict(is_met: bool, aim: str) -> str:
    """Return an aim and what became of it."""
    return f"{aim} {'met' if is_met else 'MISSED'}"


def rates_table(rates: dict[str, float], aims: dict[str, float], *, ours: str = OURS) -> list[Sequence[str]]:
    """Compare rates with the raw loop's and with ours; an aim says how many times as fast ours has to be."""
    rows: list[Sequence[str]] = [("contestant", "tasks a second", "of raw", "ours is … times as fast", "aim")]
    for name, rate in rates.items():
        of_raw = f"{rate / rates[RAW]:.2f}" if RAW in rates else ""
        ratio = rates[ours] / rate if ours in rates else None
        aim = verdict(ratio >= aims[name], f"at least {aims[name]:g}") if ratio and name in aims else ""
        rows.append((name, f"{rate:,.0f}", of_raw, f"{ratio:.2f}" if ratio else "", aim))
    return rows


def print_table(rows: list[Sequence[str]], failed: dict[str, str]) -> None:
    """Print rows, the first of which is the heading, and then those who failed."""
    heading, *lines = rows
    lines += [(name, *[""] * (len(heading) - 2), f"failed: {reason}") for name, reason in failed.items()]
    print(f"| {' | '.join(heading)} |\n|---|{'---:|' * (len(heading) - 2)}---|")
    for line in lines:
        print(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |")


# What is measured; each returns the rows of its table


def drain(bench: Bench) -> list[Sequence[str]]:
    """Empty a full queue of no-op tasks with one worker process of default settings (200,000; slow ones get fewer)."""
    cases = {each.name: partial(drained, bench, each, bench.tasks // each.slowness) for each in bench.enter(())}
    return rates_table(bench.medians(cases), DRAIN_AIMS)


def drained(bench: Bench, contestant: Contestant, count: int, *options: str, function: str = "nothing") -> float:
    """Return the rate at which one worker empties a queue of ``count`` tasks."""
    what = [] if function == "nothing" else [function]
    with (
        bench.arena.filled(contestant, count, *what) as database,
        bench.arena.worker(contestant, *options),
    ):
        return bench.arena.rate(contestant, database, count, function)


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


def enqueue(bench: Bench) -> list[Sequence[str]]:
    """Enqueue one by one, each in a transaction of its own; raw is an INSERT of the same row (2,000)."""

    def measure(contestant: Contestant) -> float:
        bench.arena.fresh(contestant).close()
        return bench.tasks / float(bench.arena.call(contestant, "singles", str(bench.tasks)))

    return rates_table(bench.medians({each.name: partial(measure, each) for each in bench.enter(())}), {RAW: 0.65})


def enqueue_many(bench: Bench) -> list[Sequence[str]]:
    """Enqueue in one call, or the nearest to it that there is; raw is a COPY of the same rows (100,000)."""

    def measure(contestant: Contestant) -> float:
        count = bench.tasks // (10 if contestant.slowness > 1 else 1)
        bench.arena.fresh(contestant).close()
        return count / float(bench.arena.call(contestant, "many", str(count)))

    aims = {RAW: 0.25, "graphile-worker, batched": 1.0}
    return rates_table(bench.medians({each.name: partial(measure, each) for each in bench.enter(())}), aims)


def latency(bench: Bench) -> list[Sequence[str]]:
    """Time from before an enqueue to the function's start, while the worker is idle; random pauses (200 a round)."""

    def measure(contestant: Contestant) -> list[float]:
        count = WARM_UP + bench.tasks
        with bench.arena.fresh(contestant), bench.arena.worker(contestant):
            bench.arena.call(contestant, "stamps", str(bench.tasks))
            bench.arena.until(lambda: len(bench.arena.stamps.read_text().splitlines()) >= count)
            return [1000 * float(line) for line in bench.arena.stamps.read_text().splitlines()[WARM_UP:]]

    cases = {each.name: partial(measure, each) for each in bench.enter(()) if each.name != RAW}
    rows: list[Sequence[str]] = [("contestant", "p50, ms", "p95, ms", "aim")]
    for name, rounds in bench.measure(cases).items():
        p50, p95 = (statistics.median(statistics.quantiles(each, n=20)[at] for each in rounds) for at in (9, 18))
        aim = verdict(p50 <= 3 and p95 <= 8, "at most 3 and 8") if name == OURS else ""
        rows.append((name, f"{p50:.1f}", f"{p95:.1f}", aim))
    return rows


def idle(bench: Bench) -> list[Sequence[str]]:
    """Transactions a second of a worker that has nothing to do, as PostgreSQL counts them (for 20 seconds)."""

    def measure(contestant: Contestant) -> float:
        said = "SELECT sum(xact_commit + xact_rollback)::int FROM pg_stat_database WHERE datname = %s"
        database = bench.arena.filled(contestant, 1)
        with bench.arena.worker(contestant):
            bench.arena.until(lambda: contestant.left(database, "nothing") == 0)
            # Our own statements are counted when the session ends; a worker's, up to ten seconds later.
            database.close()
            time.sleep(12)
            before = bench.arena.value(said, contestant.key)
            time.sleep(bench.tasks)
            return (bench.arena.value(said, contestant.key) - before) / bench.tasks

    without_server = (RAW, "Celery with Redis")
    cases = {each.name: partial(measure, each) for each in bench.enter(()) if each.name not in without_server}
    rows: list[Sequence[str]] = [("contestant", "transactions a second", "aim")]
    for name, rate in bench.medians(cases).items():
        rows.append((name, f"{rate:.2f}", verdict(rate <= 1, "at most 1") if name == OURS else ""))
    return rows


def memory(bench: Bench) -> list[Sequence[str]]:
    """Resident memory, threads and sessions of our worker: idle, after half of the tasks, after all (1,000,000)."""

    def measure(contestant: Contestant) -> list[tuple[float, int, int]]:
        half = bench.tasks // 2
        with bench.arena.filled(contestant, 1) as database, bench.arena.worker(contestant) as process:
            found = []
            for count in (0, half, half):
                if count:
                    bench.arena.call(contestant, "many", str(count))
                bench.arena.until(lambda: contestant.left(database, "nothing") == 0)
                time.sleep(1)
                sessions = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s AND pid <> %s"
                others = bench.arena.value(sessions, contestant.key, database.info.backend_pid)
                found.append((resident(process), threads(process), others))
        return found

    rows: list[Sequence[str]] = [("when", "MB", "threads", "sessions", "aim")]
    moments = ("at the start", f"after {bench.tasks // 2:,} tasks", f"after {bench.tasks:,} tasks")
    for rounds in bench.measure({each.name: partial(measure, each) for each in bench.enter((OURS,))}).values():
        found = [tuple(map(statistics.median, zip(*moment, strict=True))) for moment in zip(*rounds, strict=True)]
        _, half, full = found
        is_flat = full[0] <= 1.05 * half[0] and full[1:] == half[1:]
        aims = ["at most 70", "at most 70", "at most 70, 5 % more than before, and no thread or session more"]
        for moment, values, aim in zip(moments, found, aims, strict=True):
            is_met = values[0] <= 70 and (is_flat or values is not full)
            rows.append((moment, f"{values[0]:.1f}", *(f"{value:.0f}" for value in values[1:]), verdict(is_met, aim)))
    return rows


def history(bench: Bench) -> list[Sequence[str]]:
    """Empty a queue beside a million finished tasks, and without them (400,000)."""

    def measure() -> float:
        with bench.arena.fresh(bench.ours) as database:
            database.execute(FINISHED)
            bench.arena.fill(bench.ours, database, bench.tasks)
            with bench.arena.worker(bench.ours):
                return bench.arena.rate(bench.ours, database, bench.tasks)

    bench.enter((OURS,))
    return cost_table(bench, "beside a million finished tasks", measure, partial(drained, bench, bench.ours), 0.10)


FINISHED = """
INSERT INTO django_pglock_task (queue, backend, task_path, status, attempts, started_at, last_attempted_at, finished_at)
SELECT 'default', 'default', 'bench.app.tasks.nothing', 'SUCCESSFUL', 1, now(), now(), now()
FROM generate_series(1, 1000000)
"""


def xmin(bench: Bench) -> list[Sequence[str]]:
    """Empty a queue while another session's old snapshot keeps all dead rows alive, and without it (150,000)."""

    def measure() -> float:
        with bench.arena.filled(bench.ours, bench.tasks) as database, bench.arena.connect(bench.ours.key) as other:
            other.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            other.execute("SELECT count(*) FROM django_pglock_worker")
            with bench.arena.worker(bench.ours):
                return bench.arena.rate(bench.ours, database, bench.tasks)

    bench.enter((OURS,))
    return cost_table(bench, "beside an open transaction", measure, partial(drained, bench, bench.ours), 0.35)


def keys(bench: Bench) -> list[Sequence[str]]:
    """Empty a queue beside 100,000 tasks that wait for one lock key, and without them (400,000).

    The key's holder sleeps, in one of the worker's threads, in both cases.
    """

    def measure(waiting: int, count: int) -> float:
        with bench.arena.fresh(bench.ours) as database:
            bench.arena.fill(bench.ours, database, 1 + waiting, "sleep_alone", "3600")
            bench.arena.fill(bench.ours, database, count)
            with bench.arena.worker(bench.ours):
                return bench.arena.rate(bench.ours, database, count)

    bench.enter((OURS,))
    name = "beside 100,000 that wait for a key"
    return cost_table(bench, name, partial(measure, 100_000, bench.tasks), partial(measure, 0), 0.10)


def cpu(bench: Bench) -> list[Sequence[str]]:
    """CPU time of the server and of the client for one enqueue, by what the task asks for (1,000 calls of each)."""

    def measure() -> dict[str, tuple[float, float]]:
        bench.arena.fresh(bench.ours).close()
        return json.loads(bench.arena.call(bench.ours, "cpu", str(bench.tasks)))

    bench.enter((OURS,))
    rounds = bench.measure({"cpu": measure})["cpu"]
    rows: list[Sequence[str]] = [("the task asks for", "server, µs", "of plain", "client, µs", "of plain", "aim")]
    costs = {kind: [statistics.median(each[kind][side] for each in rounds) for side in (0, 1)] for kind in rounds[0]}
    for kind, cost in costs.items():
        plain = costs["nothing, in a transaction" if kind.endswith("in a transaction") else "nothing"]
        ratios = [one / other for one, other in zip(cost, plain, strict=True)]
        aim = verdict(ratios[0] <= 3, "at most 3") if kind in CPU_AIMS else ""
        cells = [cell for one, ratio in zip(cost, ratios, strict=True) for cell in (f"{one:,.0f}", f"{ratio:.1f}")]
        rows.append((kind, *cells, aim))
    return rows


CPU_AIMS = {
    *("lock=, a key of its own", "lock=, one key for all", "lock=, in a transaction", "unique=", "after="),
    *("rate=", "rate=, behind others that wait"),
}


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


#: The function of each case, and how many different keys its calls have; nothing: as many as calls.
KEYED = {
    "a lock key each": ("locked", 0),
    "100 lock keys": ("locked", 100),
    "unique": ("unique", 0),
    "fair over 100 keys": ("fair", 100),
}
KEYED_SHARES = {"unique": 0.8, "fair over 100 keys": 0.5}
KEYED_AIMS = {"graphile-worker, batched": 3, "procrastinate": 10}


def drained_by_key(bench: Bench, contestant: Contestant, count: int, function: str, keys: int) -> float:
    """Return the rate at which one worker empties a queue of tasks with so many different keys."""
    with bench.arena.fresh(contestant) as database:
        bench.arena.call(contestant, "keyed", str(count), function, str(keys))
        settle_down(database)
        with bench.arena.worker(contestant):
            return bench.arena.rate(contestant, database, count, function if contestant is bench.ours else "nothing")


def cost_table(
    bench: Bench, name: str, measure: Case, without: Callable[[int], float], limit: float
) -> list[Sequence[str]]:
    """Say how much slower a case is than the same without what is in its way."""
    rates = bench.medians({name: measure, "without": partial(without, bench.tasks)})
    rows: list[Sequence[str]] = [("case", "tasks a second", "cost", "aim")]
    for each, rate in rates.items():
        cost = 1 - rate / rates.get("without", rate)
        aim = verdict(cost < limit, f"below {limit:.0%}") if each == name and len(rates) > 1 else ""
        rows.append((each, f"{rate:,.0f}", f"{cost:.1%}" if each == name else "", aim))
    return rows


def scaling(bench: Bench) -> list[Sequence[str]]:
    """Run tasks that wait 5 ms by one to four worker processes of ours (3,000 a process)."""
    bench.enter((OURS,))
    cases = {f"{count} processes": partial(slept, bench, count, count * bench.tasks, "0.005") for count in range(1, 5)}
    rates = bench.medians(cases)
    rows: list[Sequence[str]] = [("worker processes", "tasks a second", "of linear", "aim")]
    for count, rate in enumerate(rates.values(), 1):
        share = rate / (count * rates["1 processes"]) if "1 processes" in rates else 0
        rows.append((str(count), f"{rate:,.0f}", f"{share:.2f}", verdict(share >= 0.9, "at least 0.9")))
    return rows


def long(bench: Bench) -> list[Sequence[str]]:
    """Run tasks that wait 100 ms by two worker processes of four threads each (800)."""
    bench.enter((OURS,))
    rate = bench.medians({"two processes": partial(slept, bench, 2, bench.tasks, "0.1")}).get("two processes")
    rows: list[Sequence[str]] = [("case", "tasks a second", "ideal", "time over the ideal", "aim")]
    if rate:
        over = 80 / rate - 1
        rows.append(("two processes", f"{rate:.1f}", "80", f"{over:.1%}", verdict(over <= 0.1, "at most 10 %")))
    return rows


def naps(bench: Bench) -> list[Sequence[str]]:
    """Run tasks that wait 5 to 400 ms, several at once: the share of threads / seconds that a process reaches."""
    bench.enter((OURS, *SLEEPERS))
    there = list(bench.contestants.values())
    return nap_cases.table(bench, there, bench.ours, verdict)


def slept(bench: Bench, processes: int, count: int, seconds: str) -> float:
    """Return the rate at which worker processes run tasks that sleep; the tasks come when the processes are there."""
    with bench.arena.fresh(bench.ours) as database, ExitStack() as stack:
        for _ in range(processes):
            stack.enter_context(bench.arena.worker(bench.ours))
        there = "SELECT count(*) = %s FROM django_pglock_worker WHERE is_sleeping"
        bench.arena.until(lambda: database.execute(there, (processes,)).fetchone()[0])
        bench.arena.call(bench.ours, "many", str(count), "sleep", seconds)
        return bench.arena.rate(bench.ours, database, count, "sleep")


#: Each measurement, with its default for --tasks and --rounds. For ``idle``, --tasks are seconds. Rates of draining are
#: compared with 200,000 tasks or more: with 60,000 rows the planner reads the whole table in each claim, and a case
#: with more rows than the other would seem to cost nothing.
MEASUREMENTS: dict[str, tuple[Callable[[Bench], list[Sequence[str]]], int, int]] = {
    "drain": (drain, 200_000, 5),
    "atomic": (atomic, 10_000, 5),
    "enqueue": (enqueue, 2_000, 5),
    "enqueue_many": (enqueue_many, 100_000, 5),
    "latency": (latency, 200, 3),
    "idle": (idle, 20, 1),
    "memory": (memory, 1_000_000, 1),
    "history": (history, 400_000, 5),
    "xmin": (xmin, 150_000, 3),
    "scaling": (scaling, 3_000, 3),
    "long": (long, 800, 3),
    "keys": (keys, 400_000, 5),
    "naps": (naps, 0, 3),
    "cpu": (cpu, 1_000, 3),
    "keyed": (keyed, 100_000, 3),
}


def parse(arguments: Iterable[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="measurement", required=True)
    for name, (measure, tasks, rounds) in MEASUREMENTS.items():
        command = commands.add_parser(name, help=(measure.__doc__ or "").splitlines()[0], description=measure.__doc__)
        command.add_argument("--tasks", type=int, default=tasks, help="How many (default: %(default)s).")
        command.add_argument("--rounds", type=int, default=rounds, help="How often (default: %(default)s).")
        command.add_argument("--only", nargs="+", default=[], help="Only contestants whose names contain one of these.")
        command.add_argument("--cases", default="", help="Only cases whose names contain this (naps).")
        command.add_argument("--cache", type=Path, default=ROOT / ".bench", help="Where the others are installed.")
    return parser.parse_args(arguments)


def main() -> None:
    """Measure and print."""
    options = parse()
    # So that servers and workers go, too, when somebody ends us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    options.cache = options.cache.resolve()
    measure = MEASUREMENTS[options.measurement][0]
    with ExitStack() as stack, Arena() as arena:
        bench = Bench(arena, options, stack)
        rows = measure(bench)
        print(f"**{options.measurement}**: {(measure.__doc__ or '').splitlines()[0]} {bench.heading()}\n")
        print_table(rows, bench.failed)


if __name__ == "__main__":
    main()
