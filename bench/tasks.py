"""Measure the task queue against others and against raw psycopg, all in one run, and print a table in Markdown.

    pip install -r bench/requirements.txt
    python bench/tasks.py drain [--only NAME ...] [--rounds N] [--tasks N]

What the others need is installed on first use into the folder ``.bench`` (or ``--cache``): virtual environments, node
modules, Redis. One that cannot be installed, or fails, stands in the table with the reason. All share one private
PostgreSQL with fsync and synchronous_commit on, each run has a fresh database, the order is drawn anew in each round,
and a figure is the median of all rounds. How the clock runs is said in ``bench/testbed.py``.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import drains, enqueues, workers
from bench.rounds import Bench
from bench.tables import print_table
from bench.testbed import ROOT, Testbed

#: Each measurement, with its default for --tasks and --rounds. For ``idle``, --tasks are seconds. Rates of draining are
#: compared with 200,000 tasks or more: with 60,000 rows the planner reads the whole table in each claim, and a case
#: with more rows than the other would seem to cost nothing.
Measurements = dict[str, tuple[Callable[[Bench], list[Sequence[str]]], int, int]]
MEASUREMENTS: Measurements = {
    "drain": (drains.drain, 200_000, 5),
    "atomic": (drains.atomic, 10_000, 5),
    "enqueue": (enqueues.enqueue, 2_000, 5),
    "enqueue_many": (enqueues.enqueue_many, 100_000, 5),
    "unique": (enqueues.unique, 100_000, 5),
    "latency": (workers.latency, 200, 3),
    "idle": (workers.idle, 20, 1),
    "memory": (workers.memory, 1_000_000, 1),
    "history": (drains.history, 400_000, 5),
    "xmin": (drains.xmin, 150_000, 3),
    "scaling": (workers.scaling, 3_000, 3),
    "long": (workers.long, 800, 3),
    "keys": (drains.keys, 400_000, 5),
    "naps": (workers.naps, 0, 1),
    "cpu": (enqueues.cpu, 1_000, 3),
    "keyed": (drains.keyed, 100_000, 3),
}


def parse(measurements: Measurements, description: str | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="measurement", required=True)
    for name, (measure, tasks, rounds) in measurements.items():
        command = commands.add_parser(name, help=(measure.__doc__ or "").splitlines()[0], description=measure.__doc__)
        command.add_argument("--tasks", type=int, default=tasks, help="How many (default: %(default)s).")
        command.add_argument("--rounds", type=int, default=rounds, help="How often (default: %(default)s).")
        command.add_argument("--only", nargs="+", default=[], help="Only contestants whose names contain one of these.")
        command.add_argument("--cases", default="", help="Only cases whose names contain this (naps).")
        command.add_argument("--cache", type=Path, default=ROOT / ".bench", help="Where the others are installed.")
    return parser.parse_args()


def main(measurements: Measurements = MEASUREMENTS, description: str | None = __doc__) -> None:
    """Measure and print."""
    options = parse(measurements, description)
    # So that servers and workers go, too, when somebody ends us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    options.cache = options.cache.resolve()
    measure = measurements[options.measurement][0]
    with ExitStack() as stack, Testbed() as testbed:
        bench = Bench(testbed, options, stack)
        rows = measure(bench)
        print(f"**{options.measurement}**: {(measure.__doc__ or '').splitlines()[0]} {bench.heading()}\n")
        print_table(rows, bench.failed)


if __name__ == "__main__":
    main()
