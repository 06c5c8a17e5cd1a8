"""What a worker does while it waits, and how several work side by side: latency, idle load, memory, scaling."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from bench import naps as nap_cases
from bench.contestants.base import WARM_UP, Contestant
from bench.rounds import OURS, RAW, Bench
from bench.tables import verdict
from bench.testbed import resident, threads

#: Who takes part where tasks last a while.
SLEEPERS = ("procrastinate", "Celery with Redis", "Oban for Python", "graphile-worker, batched")


def latency(bench: Bench) -> list[Sequence[str]]:
    """Time from before an enqueue to the function's start, while the worker is idle; random pauses (200 a round)."""

    def measure(contestant: Contestant) -> list[float]:
        count = WARM_UP + bench.tasks
        with bench.testbed.fresh(contestant), bench.testbed.worker(contestant):
            bench.testbed.call(contestant, "stamps", str(bench.tasks))
            return bench.testbed.until(lambda: (found := bench.testbed.stamped())[count - 1 :] and found)[WARM_UP:]

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
        database = bench.testbed.filled(contestant, 1)
        with bench.testbed.worker(contestant):
            bench.testbed.until(lambda: contestant.left(database, "nothing") == 0)
            # Our own statements are counted when the session ends; a worker's, up to ten seconds later.
            database.close()
            time.sleep(12)
            before = bench.testbed.value(said, contestant.key)
            time.sleep(bench.tasks)
            return (bench.testbed.value(said, contestant.key) - before) / bench.tasks

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
        with bench.testbed.filled(contestant, 1) as database, bench.testbed.worker(contestant) as process:
            found = []
            for count in (0, half, half):
                if count:
                    bench.testbed.call(contestant, "many", str(count))
                bench.testbed.until(lambda: contestant.left(database, "nothing") == 0)
                time.sleep(1)
                sessions = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s AND pid <> %s"
                others = bench.testbed.value(sessions, contestant.key, database.info.backend_pid)
                found.append((resident(process), threads(process), others))
        return found

    rows: list[Sequence[str]] = [("when", "MB", "threads", "sessions", "aim")]
    moments = ("at the start", f"after {bench.tasks // 2:,} tasks", f"after {bench.tasks:,} tasks")
    for rounds in bench.measure({each.name: partial(measure, each) for each in bench.enter((OURS,))}).values():
        found = [tuple(map(statistics.median, zip(*moment, strict=True))) for moment in zip(*rounds, strict=True)]
        _, half, full = found
        is_flat = full[0] <= 1.05 * half[0] and full[1] <= half[1] and full[2] <= half[2]
        aims = ["at most 70", "at most 70", "at most 70, 5 % more than before, and no thread or session more"]
        for moment, values, aim in zip(moments, found, aims, strict=True):
            is_met = values[0] <= 70 and (is_flat or values is not full)
            rows.append((moment, f"{values[0]:.1f}", *(f"{value:.0f}" for value in values[1:]), verdict(is_met, aim)))
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
    return nap_cases.table(bench, list(bench.contestants.values()), verdict)


def slept(bench: Bench, processes: int, count: int, seconds: str) -> float:
    """Return the rate at which worker processes run tasks that sleep; the tasks come when the processes are there."""
    with bench.testbed.fresh(bench.ours) as database, ExitStack() as stack:
        for _ in range(processes):
            stack.enter_context(bench.testbed.worker(bench.ours))
        there = "SELECT count(*) = %s FROM django_pglock_worker WHERE is_sleeping"
        bench.testbed.until(lambda: database.execute(there, (processes,)).fetchone()[0])
        bench.testbed.call(bench.ours, "many", str(count), "sleep", seconds)
        return bench.testbed.rate(bench.ours, database, count, "sleep")
