"""Take and free advisory locks: ours, two peers' and raw psycopg's, in turn, in one run; print rates and ratios.

    python -m venv /tmp/bench && /tmp/bench/bin/pip install -r bench/requirements.txt
    /tmp/bench/bin/python bench/locks.py [--rounds 40] [--slice 0.1] [--only timeout]

All use one connection each to the same private PostgreSQL over its Unix socket. In each round the contestants of a
case take their slice of time in an order drawn anew; the rate is the median of all rounds. Round trips are counted on
the wire, by a proxy in between, in a pass of its own.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date, timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.testbed import configure
from bench.wire import Wire
from example_project.postgres import PrivatePostgres

KEY = 4_711
MANY = 100
OURS, PGLOCK, PGWARE, RAW = "django_pglock", "django-pglock", "django-pgware", "raw psycopg"
FREE = f"SELECT pg_advisory_unlock({KEY})"
SECOND = timedelta(seconds=1)
Use = Callable[[], None]
Case = tuple[str, dict[str, Use]]


def prepare(folder: str) -> None:
    """Set Django up, with the apps of both packages."""
    configure(folder, "pglock", "pgactivity")


def raw_cursor() -> Any:
    """Return psycopg's own cursor on Django's connection: the same session settings for all."""
    from django.db import connection

    connection.ensure_connection()
    return connection.connection.cursor()


def held(make: Callable[[], Any]) -> Use:
    """Take a lock and free it, by a context manager."""

    def use() -> None:
        with make():
            pass

    return use


def sent(raw: Any, *statements: str) -> Use:
    """Send statements by psycopg's own cursor."""

    def use() -> None:
        for statement in statements:
            raw.execute(statement)

    return use


def watched(inner: Use) -> Use:
    """Use it beside an execute wrapper, as of an APM: then statements go through Django's cursor."""
    from django.db import connection

    def use() -> None:
        with connection.execute_wrapper(lambda execute, *statement: execute(*statement)):
            inner()

    return use


def session_cases() -> Iterator[Case]:
    """Yield what is measured outside a transaction."""
    raw = raw_cursor()
    yield from plain_cases(raw)
    yield timeout_case(raw)
    yield from own_transaction_cases(raw)
    yield many_locks_case(raw)


def plain_cases(raw: Any) -> Iterator[Case]:
    """Yield the cases of a session lock without a timeout."""
    import pglock
    from django_pg_utils import advisory_lock

    from django_pglock import lock, try_lock

    yield (
        "take and free",
        {
            OURS: held(lambda: lock("report")),
            PGLOCK: held(lambda: pglock.advisory("report")),
            PGWARE: held(lambda: advisory_lock("report")),
            RAW: sent(raw, f"SELECT pg_advisory_lock({KEY})", FREE),
        },
    )
    yield (
        "try",
        {
            OURS: held(lambda: try_lock("report")),
            PGLOCK: held(lambda: pglock.advisory("report", timeout=0)),
            PGWARE: held(lambda: advisory_lock("report", wait=False)),
            RAW: sent(raw, f"SELECT pg_try_advisory_lock({KEY})", FREE),
        },
    )
    yield (
        "take and free, while somebody watches statements",
        {
            OURS: watched(held(lambda: lock("report"))),
            PGLOCK: watched(held(lambda: pglock.advisory("report"))),
            PGWARE: watched(held(lambda: advisory_lock("report"))),
        },
    )


def timeout_case(raw: Any) -> Case:
    """Return the case of a session lock with a timeout."""
    import pglock

    from django_pglock import lock

    return (
        "timeout",
        {
            OURS: held(lambda: lock("report", timeout=1)),
            PGLOCK: held(lambda: pglock.advisory("report", timeout=SECOND)),
            RAW: sent(raw, f"SELECT set_config('lock_timeout', '1000', true);SELECT pg_advisory_lock({KEY})", FREE),
        },
    )


def own_transaction_cases(raw: Any) -> Iterator[Case]:
    """Yield the cases of a lock that opens a transaction for itself."""
    import pglock

    from django_pglock import lock

    yield (
        "own transaction",
        {
            OURS: held(lambda: lock("report", scope="transaction")),
            PGLOCK: held(lambda: pglock.advisory("report", xact=True)),
            RAW: sent(raw, "BEGIN", f"SELECT pg_advisory_xact_lock({KEY})", "COMMIT"),
        },
    )
    yield (
        "own transaction, timeout",
        {
            OURS: held(lambda: lock("report", scope="transaction", timeout=1)),
            PGLOCK: held(lambda: pglock.advisory("report", xact=True, timeout=SECOND)),
            RAW: sent(raw, "BEGIN", "SET LOCAL lock_timeout = 1000", f"SELECT pg_advisory_xact_lock({KEY})", "COMMIT"),
        },
    )


def many_locks_case(raw: Any) -> Case:
    """Return the case of many locks at once."""
    from django_pglock import lock_all

    names = [f"report {number}" for number in range(MANY)]
    return (
        f"{MANY} locks at once",
        {
            OURS: held(lambda: lock_all(*names)),
            RAW: sent(
                raw,
                *[f"SELECT pg_advisory_lock({number})" for number in range(MANY)],
                *[f"SELECT pg_advisory_unlock({number})" for number in range(MANY)],
            ),
        },
    )


def transaction_cases() -> Iterator[Case]:
    """Yield what is measured inside a transaction that is open already; only COMMIT frees these locks."""
    import pglock

    from django_pglock import lock

    raw = raw_cursor()

    def ours(**options: Any) -> Use:
        def use() -> None:
            with lock("report", **options):
                pass

        return use

    yield (
        "inside atomic",
        {
            OURS: ours(),
            PGLOCK: lambda: pglock.advisory("report", xact=True).acquire(),
            RAW: lambda: raw.execute(f"SELECT pg_advisory_xact_lock({KEY})"),
        },
    )
    yield (
        "inside atomic, timeout",
        {
            OURS: ours(timeout=1),
            PGLOCK: lambda: pglock.advisory("report", xact=True, timeout=SECOND).acquire(),
            RAW: lambda: raw.execute(
                "SAVEPOINT s;SET LOCAL lock_timeout = 1000;"
                f"SELECT pg_advisory_xact_lock({KEY});SET LOCAL lock_timeout = 0;RELEASE SAVEPOINT s"
            ),
        },
    )


@contextmanager
def inside(is_atomic: bool) -> Iterator[None]:
    """Open a transaction for a slice, if the case wants one."""
    from django.db import transaction

    if is_atomic:
        with transaction.atomic():
            yield
    else:
        yield


def rate(use: Use, seconds: float) -> float:
    """Return how often a use is done in a second, over a slice of time."""
    count, began = 0, time.perf_counter()
    end = began + seconds
    while time.perf_counter() < end:
        use()
        count += 1
    return count / (time.perf_counter() - began)


def measure(cases: Iterator[Case], options: Any, *, is_atomic: bool) -> dict[str, dict[str, float]]:
    """Return the median rate of each contestant in each case."""
    results = {}
    for name, contestants in cases:
        if options.only and options.only not in name:
            continue
        rates: dict[str, list[float]] = {contestant: [] for contestant in contestants}
        for _ in range(options.rounds):
            for contestant in random.sample(sorted(contestants), len(contestants)):
                with inside(is_atomic):
                    rates[contestant].append(rate(contestants[contestant], options.slice))
        results[name] = {contestant: statistics.median(values) for contestant, values in rates.items()}
        print(".", end="", flush=True, file=sys.stderr)
    return results


def count(wire: Wire, cases: Iterator[Case], *, is_atomic: bool) -> dict[str, dict[str, int]]:
    """Return the round trips of one use by each contestant in each case."""
    results: dict[str, dict[str, int]] = {}
    for name, contestants in cases:
        results[name] = {}
        for contestant, use in contestants.items():
            with inside(is_atomic):
                use()  # whatever is done only once
                with wire.counting() as counted:
                    use()
            results[name][contestant] = counted[0]
    return results


#: How much faster than a peer, at least: by case.
TARGETS = {
    "take and free": {PGLOCK: 1.0, PGWARE: 1.0},
    "try": {PGLOCK: 1.0, PGWARE: 1.0},
    "timeout": {PGLOCK: 2.0},
    "own transaction, timeout": {PGLOCK: 2.3},
    "inside atomic, timeout": {PGLOCK: 3.5},
}


def heading() -> str:
    """Say when, on what and with what this was measured."""
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute("SHOW server_version")
        server = cursor.fetchone()[0]
    packages = ", ".join(f"{name} {version(name)}" for name in ("django", "psycopg", "django-pglock", "django-pgware"))
    return (
        f"{date.today():%d %B %Y}, {os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}, "
        f"PostgreSQL {server} over a Unix socket, {packages}."
    )


def table(rates: dict[str, dict[str, float]], trips: dict[str, dict[str, int]]) -> Iterator[str]:
    """Yield the table, as Markdown."""
    yield "| case | contestant | round trips | uses a second | ours is … times as fast | aim |"
    yield "|---|---|---:|---:|---:|---|"
    for case, contestants in rates.items():
        for contestant, each in contestants.items():
            ratio = contestants[OURS] / each
            aim = TARGETS.get(case, {}).get(contestant)
            verdict = "" if aim is None else f"{aim:g} {'met' if ratio >= aim else 'MISSED'}"
            trip = trips[case][contestant]
            yield f"| {case} | {contestant} | {trip} | {each:,.0f} | {ratio:.2f} | {verdict} |"


def main() -> None:
    """Measure, count, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="Slices of each contestant in each case.")
    parser.add_argument("--slice", type=float, default=0.1, help="Seconds of a slice.")
    parser.add_argument("--only", default="", help="Only cases whose names contain this.")
    options = parser.parse_args()
    with PrivatePostgres(settings={"max_locks_per_transaction": "256"}) as server:
        prepare(str(server.folder))
        from django.db import connection

        rates = measure(session_cases(), options, is_atomic=False)
        rates |= measure(transaction_cases(), options, is_atomic=True)
        lines = [heading(), ""]
        connection.close()
        wire = Wire(server.folder)
        connection.settings_dict["HOST"] = wire.host
        trips = count(wire, session_cases(), is_atomic=False) | count(wire, transaction_cases(), is_atomic=True)
        connection.close()
        wire.close()
    print(file=sys.stderr)
    print("\n".join([*lines, *table(rates, trips)]))


if __name__ == "__main__":
    try:
        main()
    except ModuleNotFoundError as error:
        raise SystemExit(f"{error}. First: pip install -r bench/requirements.txt") from None
