"""What steps cost, for ``python -m bench.contestants.ours``: programs that need our package in their process."""

from __future__ import annotations

import json
import random
import time
from typing import Any

from django.db import connection, transaction

from bench.app import tasks
from bench.app.enqueueing import BLOCKS, server_time
from bench.app.models import Entry
from bench.contestants import base
from django_pglock import TaskContext, emit, enqueue_many, task
from django_pglock.models import Step, Task
from django_pglock.testing import run_tasks

#: For each kind: seconds in all, of the client's CPU, of the server's, and how often.
spent: dict[str, list[float]] = {}


@task(takes_context=True)
def many_steps(context: TaskContext, count: int, waits: str) -> None:
    """Execute steps of each kind, in blocks whose order is drawn anew."""
    connection.cursor().execute(f"SET synchronous_commit = {waits}")

    def transact(number: int) -> None:
        with transaction.atomic():
            Entry.objects.create()
            with connection.cursor() as cursor:
                cursor.execute("")

    kinds: dict[str, Any] = {
        "a record": lambda number: context.step(f"step {number}", base.small),
        "an atomic step": lambda number: context.atomic_step(f"atomic {number}", create),
        "its transaction and an empty message": transact,
    }
    # The first block is not counted: caches of the session.
    for block in range(BLOCKS + 1):
        for kind in random.sample(sorted(kinds), len(kinds)):
            before = time.perf_counter(), time.thread_time(), server_time()
            for number in range(count // BLOCKS):
                kinds[kind](block * count + number)
            after = time.perf_counter(), time.thread_time(), server_time()
            if not block:
                continue
            took = [*(end - begin for begin, end in zip(before, after, strict=True)), count // BLOCKS]
            name = f"{kind}, {'waiting' if waits == 'on' else 'not waiting'} for the disk"
            spent[name] = [one + other for one, other in zip(spent.get(name, [0.0] * 4), took, strict=True)]


def create() -> None:
    Entry.objects.create()


def records(count: int) -> None:
    """Print what each kind takes: microseconds in all, of the client's CPU, and of the server's."""
    for waits in ("on", "off"):
        many_steps.enqueue(count, waits)
    run_tasks(raise_errors=True)
    print(json.dumps({kind: [1e6 * value / values[3] for value in values[:3]] for kind, values in spent.items()}))


def emits(count: int) -> None:
    """Emit so many events, with random pauses, for which tasks wait."""
    enqueue_many(tasks.await_stamp, ((number,) for number in range(count)))
    while Step.objects.filter(event__isnull=False).count() < count:
        time.sleep(0.1)
    for number in range(count):
        time.sleep(random.uniform(0.02, 0.1))
        emit(f"bench:{number}", time.time())


def suspended(count: int) -> None:
    """Write tasks that wait for events, as a worker leaves them."""
    tasks.await_stamp.enqueue(0)
    run_tasks(until="due")
    for model in (Task, Step):
        [row] = model.objects.values()
        columns = [field.column for field in model._meta.local_fields if field.column]
        numbered = {"id": "copy", "task_id": "copy", "event": "event || copy"}
        values = ", ".join(
            numbered.get(column, column) if row.get(column) is not None else column for column in columns
        )
        names, first = ", ".join(columns), max(row.get("id") or row["task_id"], 1) + 1
        with connection.cursor() as cursor:
            cursor.execute(
                f"INSERT INTO {model._meta.db_table} ({names}) SELECT {values} FROM {model._meta.db_table}, "
                f"generate_series({first}, {first + count - 2}) AS copy"
            )
