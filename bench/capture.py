"""What capturing costs the writer: the same statements on a plain table and on a captured one, in turn, in one run.

    python -m venv /tmp/bench && /tmp/bench/bin/pip install -r bench/requirements.txt
    /tmp/bench/bin/python bench/capture.py [--rounds 40] [--rows 10000] [--only update]

Both tables are alike and in the same private PostgreSQL with fsync on. Each round does each case once on both tables,
one right after the other, in an order drawn anew. A ratio is the median of the ratios of the rounds: of the time on the
clock, and of the CPU time of the server's process.
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
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.tables import print_table, verdict
from bench.testbed import configure
from example_project.postgres import PrivatePostgres

#: Statements of one row in a round.
SINGLES = 100
ROW_AIM, BULK_AIM = 1.5, 1.1


class Cost(NamedTuple):
    """Seconds of one use: on the clock, and of the CPU of the server's process."""

    clock: float
    server: float


def prepare(folder: str) -> tuple[Any, Any]:
    """Set Django up; return the models of the plain and of the captured table."""
    configure(folder)
    from django.core.management import call_command
    from django.db import connection

    call_command("migrate", verbosity=0)
    models = tables()
    for model in models:
        with connection.schema_editor() as editor:
            editor.create_model(model)
    customer, plain, captured, *_ = models
    customer.objects.bulk_create(customer() for _ in range(1000))
    return plain, captured


def tables() -> list[Any]:
    """Return models: a table that both refer to, the plain and the captured table, and a table that refers to each.

    Most tables of a Django project have foreign keys and are referred to. PostgreSQL checks both for each row.
    Django has to be set up.
    """
    from django.db import models

    from bench.app.captured import reindex
    from django_pglock.contrib.capture import Capture

    # ruff: noqa: DJ008 - nobody looks at these rows
    class Customer(models.Model):
        class Meta:
            app_label = "bench"

    class Order(models.Model):
        customer = models.ForeignKey(Customer, models.CASCADE)
        amount = models.IntegerField(default=0)
        note = models.CharField(max_length=200, db_index=True)
        ordered_at = models.DateTimeField(auto_now_add=True)

        class Meta:
            app_label = "bench"
            abstract = True

    class Plain(Order):
        pass

    class Captured(Order):
        class Meta(Order.Meta):
            abstract = False
            constraints = [Capture(reindex, name="bench_capture")]

    class PlainLine(models.Model):
        order = models.ForeignKey(Plain, models.CASCADE)

        class Meta:
            app_label = "bench"

    class CapturedLine(models.Model):
        order = models.ForeignKey(Captured, models.CASCADE)

        class Meta:
            app_label = "bench"

    return [Customer, Plain, Captured, PlainLine, CapturedLine]


def singles(model: Any, rows: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield statements of one row, each in a transaction of its own."""
    numbers = iter(range(SINGLES * 3))

    def insert() -> None:
        model.objects.create(customer_id=1 + next(numbers), note="a note of some length")

    def update() -> None:
        model.objects.filter(pk=1 + next(numbers)).update(amount=5)

    yield "insert a row", insert
    yield "update a row", update


def bulks(model: Any, rows: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield statements of many rows."""
    from django.db import connection

    table = model._meta.db_table

    def insert() -> None:
        with connection.cursor() as cursor:
            cursor.execute(
                f'INSERT INTO "{table}" (customer_id, amount, note, ordered_at) '
                "SELECT 1 + number %% 1000, 0, 'a note of some length', now() FROM generate_series(1, %s) AS number",
                [rows],
            )

    def copy() -> None:
        statement = f'COPY "{table}" (customer_id, amount, note, ordered_at) FROM STDIN'
        with connection.cursor() as cursor, cursor.copy(statement) as lines:
            lines.write("5\t0\ta note of some length\t2026-11-22 12:00:00+00\n" * rows)

    yield f"insert {rows:,} rows", insert
    yield f"copy {rows:,} rows", copy
    yield f"update {rows:,} rows", lambda: newest(model, rows).update(amount=7)
    yield f"delete {rows:,} rows", lambda: newest(model, rows)._raw_delete(model.objects.db)


def newest(model: Any, rows: int) -> Any:
    """Return the rows that were written last."""
    last = model.objects.order_by("-pk").values_list("pk", flat=True).first()
    return model.objects.filter(pk__gt=last - rows)


def cost(use: Callable[[], Any], times: int) -> Cost:
    """Do something this number of times; return what one time costs."""
    server, began = server_time(), time.perf_counter()
    for _ in range(times):
        use()
    return Cost((time.perf_counter() - began) / times, (server_time() - server) / times)


def server_time() -> float:
    """Return the seconds of CPU that the session's process has used. Linux, the server on this machine."""
    from django.db import connection

    connection.ensure_connection()
    with open(f"/proc/{connection.connection.info.backend_pid}/schedstat") as file:
        return int(file.read().split()[0]) / 1e9


def measure(models: tuple[Any, Any], options: Any) -> dict[str, list[tuple[Cost, Cost]]]:
    """Return, for each case, the costs on both tables in each round."""
    from django.db import connection

    found: dict[str, list[tuple[Cost, Cost]]] = {}
    for number in range(options.rounds):
        for cases, times in ((singles, SINGLES), (bulks, 1)):
            pairs = [list(cases(model, options.rows)) for model in models]
            for (name, _), *_ in zip(*pairs, strict=True):
                if options.only not in name:
                    continue
                uses = [dict(pair)[name] for pair in pairs]
                costs = {index: cost(uses[index], times) for index in random.sample((0, 1), 2)}
                if number:  # the first round fills caches
                    found.setdefault(name, []).append((costs[0], costs[1]))
        with connection.cursor() as cursor:
            cursor.execute("VACUUM")
            cursor.execute("CHECKPOINT")
        print(".", end="", flush=True, file=sys.stderr)
    print(file=sys.stderr)
    return found


def rows_of_table(found: dict[str, list[tuple[Cost, Cost]]]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table."""
    yield "case", "plain, ms", "captured, ms", "ratio", "server, plain, ms", "captured, ms", "ratio", "aim"
    for name, pairs in found.items():
        cells: list[str] = []
        ratios = []
        for side in (0, 1):
            ratios.append(statistics.median(captured[side] / plain[side] for plain, captured in pairs))
            cells += [f"{1000 * statistics.median(pair[each][side] for pair in pairs):,.3f}" for each in (0, 1)]
            cells.append(f"{ratios[side]:.2f}")
        aim = ROW_AIM if name.endswith(" a row") else BULK_AIM
        yield name, *cells, verdict(ratios[0] <= aim, f"at most {aim:g}")


def heading() -> str:
    """Say when, on what and with what this was measured."""
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute("SHOW server_version")
        server = cursor.fetchone()[0]
    packages = ", ".join(f"{name} {version(name)}" for name in ("django", "psycopg"))
    return (
        f"{date.today():%d %B %Y}, {os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}, "
        f"PostgreSQL {server} with fsync on, over a Unix socket, {packages}."
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="How often each case is done.")
    parser.add_argument("--rows", type=int, default=10_000, help="Rows of a statement of many rows.")
    parser.add_argument("--only", default="", help="Only cases whose names contain this.")
    options = parser.parse_args()
    with PrivatePostgres(durable=True) as server:
        models = prepare(str(server.folder))
        found = measure(models, options)
        print(f"{heading()}\n")
        print_table([*rows_of_table(found)], {})


if __name__ == "__main__":
    main()
