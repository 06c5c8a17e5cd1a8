"""What N workers cost one server, for N from 1 to 200: busy, idle, started, stopped and killed at once.

    .venv/bin/python bench/fleet.py --workers 1 10 40
    .venv/bin/python bench/fleet.py --workers 1 --processes 32

With ``--processes`` each worker has so many children, as ``runlockworker --processes`` starts them. Each N gets a
private PostgreSQL with fsync on, and takes four minutes. At the end, a table of all figures is printed.

Nearly all figures are counts or CPU times, of the server's processes and of the workers', so that a busy machine
disturbs little. Statements are counted by pg_stat_statements. Where a figure is a time of the clock, it says so.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.fleet_server import Fleet, Server, lives, pss_of, spent, until, with_descendants

#: Seconds of the idle window. It begins when all sessions have reported what they did, and all workers have done what
#: they do once at their start, such as their first poll and their first round of upkeep off duty.
IDLE, REPORTED = 60.0, 120.0
#: Calls of the trickle, and how many a second.
TRICKLE, RATE = 200, 20
#: No-op tasks and 20 ms tasks of one drain.
NOTHINGS, NAPS = 20_000, 2_000


def start_storm(fleet: Fleet, count: int, processes: int) -> dict[str, float]:
    """Start all workers at once."""
    found: dict[str, float] = {}
    fleet.server.reset()
    with spent(fleet, found):
        fleet.start(count, processes)
    return {
        "start, s of the clock": found["clock"],
        "start, server ms a worker": 1000 * found["server"] / count,
        "start, statements a worker": fleet.server.statements()["all"] / count,
        "start, workers that failed": sum(not lives(pid) for pid in fleet.workers),
    }


def idle(fleet: Fleet, count: int) -> dict[str, float]:
    """Let all workers idle."""
    server = fleet.server
    time.sleep(REPORTED)
    sessions = dict(server.ask(
        "SELECT application_name, count(*) FROM pg_stat_activity "
        "WHERE datname = 'fleet' AND application_name <> 'bench' GROUP BY 1 -- bench"
    ))  # fmt: skip
    memory = [sum(map(pss_of, with_descendants(pid))) for pid in fleet.workers]
    found: dict[str, float] = {}
    server.reset()
    before = server.transactions()
    with spent(fleet, found):
        time.sleep(IDLE)
    sent = server.statements()
    rate = count * found["clock"]
    # The statement that asks for the position in the WAL, twice, is not theirs.
    return {
        "idle, transactions a second a worker": max(0, server.transactions() - before - 4) / rate,
        **{f"idle, {part} a second a worker": sent[part] / rate for part in ("all", "beat", "upkeep", "look", "sleep")},
        "idle, server ms a second": 1000 * found["server"] / found["clock"],
        "idle, client ms a second": 1000 * found["client"] / found["clock"],
        "sessions a worker": sum(sessions.values()) / count,
        "MB a worker": statistics.mean(memory),
    }


def one_by_one(fleet: Fleet, count: int) -> dict[str, float]:
    """Enqueue some tasks a second while all workers sleep."""
    server = fleet.server
    server.empty()
    fleet.until_asleep()
    found: dict[str, float] = {}
    server.reset()
    with spent(fleet, found):
        fleet.tell("trickle", TRICKLE, RATE)
        until(lambda: len(server.stamps.read_text().splitlines()) >= TRICKLE, "the trickle has not run")
    sent = server.statements()
    late = sorted(1000 * float(line) for line in server.stamps.read_text().splitlines())
    return {
        "trickle, statements a task": sent["all"] / TRICKLE,
        "trickle, claims a task": sent["claim"] / TRICKLE,
        "trickle, server ms a task": 1000 * found["server"] / TRICKLE,
        "trickle, client ms a task": 1000 * found["client"] / TRICKLE,
        "trickle, p50 ms": late[len(late) // 2],
        "trickle, p99 ms": late[int(len(late) * 0.99)],
    }


def drain(fleet: Fleet, name: str, count: int, *call: object) -> dict[str, float]:
    """Enqueue many tasks at once, while all workers sleep, and wait until all have run."""
    server = fleet.server
    server.empty()
    fleet.until_asleep()
    waits: list[Counter[str]] = []
    left = "SELECT NOT EXISTS (SELECT FROM django_pglock_task WHERE status <> 'SUCCESSFUL') -- bench"

    def is_done() -> bool:
        waits.append(server.lock_waits())
        return bool(server.one(left))

    found: dict[str, float] = {}
    server.reset()
    with spent(fleet, found):
        fleet.tell("many", count, *call)
        until(is_done, f"not all {name} tasks have run")
    sent = server.statements()
    most = sum(waits, Counter[str]()).most_common(1)
    print(f"  {name}: waits {most}", file=sys.stderr)
    dead = "SELECT n_dead_tup FROM pg_stat_user_tables WHERE relname = 'django_pglock_task' -- bench"
    return {
        f"{name}, server µs a task": 1e6 * found["server"] / count,
        f"{name}, client µs a task": 1e6 * found["client"] / count,
        f"{name}, statements a task": sent["all"] / count,
        f"{name}, claims a task": sent["claim"] / count,
        f"{name}, tasks a second of the clock": count / found["clock"],
        f"{name}, sessions that wait for a lock": sum(map(Counter.total, waits)) / len(waits),
        f"{name}, WAL bytes a task": found["wal"] / count,
        f"{name}, dead rows a task": server.one(dead) / count,
    }


def kill_and_stop(fleet: Fleet, count: int) -> dict[str, float]:
    """Kill half of the workers while each thread has a task, then stop the others."""
    server = fleet.server
    server.empty()
    fleet.until_asleep()
    threads = 4 * count * fleet.processes
    fleet.tell("many", threads, "sleep", 3600)
    running = "SELECT count(*) FROM django_pglock_task WHERE status = 'RUNNING' -- bench"
    # Not only the number of tasks: what was claimed ahead is RUNNING, too, and is given back.
    full = (
        "SELECT count(*) FROM (SELECT FROM django_pglock_task WHERE status = 'RUNNING' GROUP BY worker "
        "HAVING count(*) = 4) AS worker -- bench"
    )
    until(lambda: 4 * server.one(full) == threads, "not all long tasks run")
    found: dict[str, float] = {}
    killed, fleet.workers = fleet.workers[: count // 2], fleet.workers[count // 2 :]
    if killed:
        theirs = "SELECT array_agg(id) FROM django_pglock_worker WHERE pid = ANY (%s) -- bench"
        ids = server.one(theirs, [each for pid in killed for each in with_descendants(pid)])
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        owned = f"{running.removesuffix(' -- bench')} AND worker = ANY (%s) -- bench"
        found["kill, s of the clock until all tasks are rescued"] = until(
            lambda: not server.one(owned, ids), "not all tasks are rescued"
        )
    stopped: dict[str, float] = {}
    workers = list(fleet.workers)
    began = time.monotonic()
    for pid in workers:
        os.kill(pid, signal.SIGTERM)
    until(lambda: not any(map(lives, workers)), "not all workers have ended", each=0.2)
    stopped["stop, s of the clock after 2 s of grace"] = time.monotonic() - began
    stopped["stop, tasks not given back"] = server.one(running)
    stopped["stop, rows of workers left"] = server.one("SELECT count(*) FROM django_pglock_worker")
    fleet.workers = []
    return {**found, **stopped}


def measure(count: int, processes: int) -> dict[str, float]:
    """Return all figures of a fleet of so many workers."""
    found: dict[str, float] = {}
    with Server() as server:
        server.prepare()
        server.empty()
        with Fleet(server) as fleet:
            found |= start_storm(fleet, count, processes)
            found |= idle(fleet, count)
            found |= one_by_one(fleet, count)
            found |= drain(fleet, "no-op", NOTHINGS, "nothing")
            found |= drain(fleet, "20 ms", NAPS, "sleep", 0.02)
            found |= kill_and_stop(fleet, count)
        server.fleet.close()
    return found


def main() -> None:
    """Measure fleets, and print a table of their figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 5, 10, 20, 50, 100, 200])
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    found: list[dict[str, float]] = []
    for count in options.workers:
        print(f"{count} workers", file=sys.stderr, flush=True)
        found.append(measure(count, options.processes))
        print(json.dumps(found[-1], indent=1, ensure_ascii=False), file=sys.stderr, flush=True)
    print(f"| | {' | '.join(map(str, options.workers))} |\n|---|{'---:|' * len(found)}")
    for figure in dict.fromkeys(figure for each in found for figure in each):
        print(f"| {figure} | {' | '.join(f'{each.get(figure, 0):.4g}' for each in found)} |")


if __name__ == "__main__":
    main()
