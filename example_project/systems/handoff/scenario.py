"""The scenario of this system: the same requests through tasks and through the table, with kills of back ends.

Then a search table follows the changes of 17 tables.
"""

from __future__ import annotations

import json
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

from django.db import connection, transaction
from django.db.models import Func, IntegerField, Sum

from django_pglock import enqueue_many
from django_pglock.models import Attempt, Task
from django_pglock.tasks.states import FINISHED
from example_project.demo.screen import counted
from example_project.systems.handoff import back_end, tasks
from example_project.systems.handoff.models import Request, Sheet
from example_project.systems.handoff.search import PARTS, Order
from example_project.systems.harness import Harness

REQUESTS, SHEETS, ORDERS = 10_000, 300, 2000
#: Requests that a front end hands over in one transaction.
TOGETHER = 20
BACK_ENDS = 2
#: Seconds after which the requests count as never handled.
NEVER = 300.0

WRONG_SHEETS = """
SELECT count(*) FROM jsonb_each(%s::jsonb) AS expected (name, lines)
FULL JOIN (SELECT split_part(name, ' ', 2) AS name, lines FROM handoff_sheet WHERE name LIKE %s) AS sheet USING (name)
WHERE sheet.lines IS DISTINCT FROM expected.lines
"""
DIFFERENT_SHEETS = """
SELECT count(*) FROM (
    SELECT FROM handoff_sheet GROUP BY split_part(name, ' ', 2)
    HAVING count(*) <> 2 OR min(lines::text) <> max(lines::text)
) AS different
"""
SECOND_CREATES = "SELECT count(*) - count(DISTINCT sheet) FROM handoff_request WHERE kind = 'create'"
MIXED_RUNS = """
SELECT count(*) FROM (
    SELECT FROM handoff_request GROUP BY run
    HAVING count(DISTINCT sheet) > 1 OR (bool_or(kind = 'create') AND count(*) > 1)
) AS mixed
"""
TITLES = {"tasks": "With tasks", "table": "With the table"}
#: How many updates there were, and in how many runs. The tasks of one call are settled by one transaction.
RUNS = {
    "tasks": "SELECT count(*), count(DISTINCT xmin::text) FROM django_pglock_task WHERE task_path LIKE %s",
    "table": "SELECT count(*), count(DISTINCT run) FROM handoff_request WHERE kind LIKE %s",
}
#: Which process holds which rows. A task names its worker. A locked row names the transaction that has it, and
#: a transaction that runs has a lock on its own name.
HELD_ROWS = {
    "tasks": """
SELECT worker.pid, array_agg(task.id ORDER BY task.id)
FROM django_pglock_task AS task JOIN django_pglock_worker AS worker ON worker.id = task.worker
WHERE task.status = 'RUNNING' GROUP BY worker.pid
""",
    "table": """
SELECT lock.pid, array_agg(request.id ORDER BY request.id)
FROM handoff_request AS request JOIN pg_locks AS lock ON lock.transactionid = request.xmax
WHERE lock.granted GROUP BY lock.pid
""",
}
HOLDERS = {"tasks": "the worker with the process", "table": "the session with the process"}
TEXTS = " UNION ALL ".join(
    [
        "SELECT id, text FROM handoff_order",
        *(f'SELECT order_id, text FROM "{part._meta.db_table}"' for part in PARTS),
    ]
)
#: Orders whose entry is not what the 17 tables say, or whose entry is left although the order is gone.
WRONG_ENTRIES = f"""
SELECT count(*)
FROM (SELECT id, string_agg(text, ' ' ORDER BY text COLLATE "C") AS text FROM ({TEXTS}) AS each GROUP BY id) AS expected
FULL JOIN handoff_entry AS entry ON entry."order" = expected.id
WHERE entry.text IS DISTINCT FROM expected.text
"""


@dataclass(frozen=True)
class Asked:
    """One request of a user."""

    kind: str
    sheet: str
    line: str = ""


def run_scenario(harness: Harness, count: int = REQUESTS, sheets: int = SHEETS, orders: int = ORDERS) -> None:
    """Send the requests through both planes, change the 17 tables, and claim what then holds."""
    harness.say(
        f"{count:,} requests for {sheets} sheets: creates, updates, and creates that were clicked again. "
        "Another transaction\nstays open all the time, so that no dead row can be removed."
    )
    with old_snapshot():
        harness.say("\nWith tasks. Half of the requests are handed over before the workers start.")
        worker = ("runlockworker", "--threads", "4", "--no-reload")
        run(harness, "tasks", count, sheets, lambda: harness.fleet.start(*worker), has_open_tasks)
        lost = Attempt.objects.filter(outcome="LOST").count()
        harness.say(f"  {lost} tasks were taken back from killed workers. {runs_in_words('tasks')}")
        harness.say("\nWith a table and ClaimManager. Half of the requests are handed over before the back ends start.")
        run(harness, "table", count, sheets, lambda: harness.call(back_end.serve), back_end.new.exists)
        harness.say(f"  {runs_in_words('table')}")
        behind = Request.objects.latest("id").id
        harness.say(
            f"  Below the open transaction, a search from the start reads {pages_read(0):,} pages, and one behind the "
            f"line in the sand {pages_read(behind)}."
        )
    search_table(harness, orders)
    claim(harness, count, sheets)


def run(
    harness: Harness,
    plane: str,
    count: int,
    sheets: int,
    start: Callable[[], subprocess.Popen[bytes]],
    has_open: Callable[[], bool],
) -> None:
    """Send all requests through one plane, and kill a back end after each third of the updates."""
    began, updates = time.monotonic(), sum(asked.kind == "update" for asked in requests(count, sheets))
    front_end(plane, count, sheets, 0)
    back_ends, kills = [start() for _ in range(BACK_ENDS)], [updates // 3, 2 * updates // 3]
    front = harness.call(front_end, plane, count, sheets, 1)
    in_progress: list[tuple[int, list[int]]] = []
    while kills or front.poll() is None or has_open():
        lines = count_lines(plane)
        harness.screen.progress(lines, updates, "lines in the sheets")
        in_progress = max(in_progress, rows_by_process(plane), key=len)
        if kills and lines >= kills[0]:
            kills.pop(0)
            victim = back_ends.pop(0)
            victim.kill()
            victim.wait()
            harness.say(f"  A back end (process {victim.pid}) was killed with SIGKILL, and another one starts.")
            back_ends.append(start())
        for process in back_ends:
            harness.fleet.require_running(process)
        if time.monotonic() > began + NEVER:
            raise TimeoutError(f"Some requests are never handled.\n{harness.fleet.output()}")
        time.sleep(0.2)
    if front.returncode:
        raise RuntimeError(f"The front end has failed.\n{harness.fleet.output()}")
    note = f"lines in the sheets after {time.monotonic() - began:.1f} s"
    harness.screen.progress(count_lines(plane), updates, note, is_last=True)
    for process, rows in in_progress:
        harness.say(f"  While requests were handled, {HOLDERS[plane]} {process} had rows {in_words(rows)}")
    for process in back_ends:
        process.terminate()


def search_table(harness: Harness, count: int) -> None:
    """Change 17 tables in all ways that there are, while no worker runs and beside one."""
    harness.say(f"\nA search table about {count:,} orders, gathered from 17 tables. No worker runs.")
    made = tasks_made(lambda: write_tables(count))
    harness.say(f"  The ORM, plain SQL and COPY write {rows_written():,} rows: {counted(made, 'task')}.")
    gone: list[int] = []
    made = tasks_made(lambda: gone.append(roll_back()))
    harness.say(f"  An order and its parts are written and rolled back: {counted(made, 'task')}.")
    worker = harness.fleet.start("runlockworker", "--threads", "4", "--no-reload")
    made = tasks_made(lambda: execute("UPDATE handoff_item SET text = 'another ' || text"))
    harness.say(
        f"  A worker starts. One UPDATE changes {2 * count:,} rows, two of each order: {counted(made, 'task')}."
    )
    deadline = time.monotonic() + NEVER
    while has_open_tasks():
        harness.fleet.require_running(worker)
        if time.monotonic() > deadline:
            raise TimeoutError(f"Some changes never reach the search table.\n{harness.fleet.output()}")
        time.sleep(0.05)
    worker.terminate()
    harness.claim("The search table has what the 17 tables say", WRONG_ENTRIES)
    rolled_back = "SELECT count(*) FROM django_pglock_task WHERE kwargs -> 'ids' @> to_jsonb(%s)"
    harness.claim("What was rolled back has made no task", rolled_back, gone[0])


def claim(harness: Harness, count: int, sheets: int) -> None:
    """Claim what holds now."""
    expected = json.dumps(sheets_after(requests(count, sheets)))
    for plane in RUNS:
        harness.claim(
            f"{TITLES[plane]}, each line is in its sheet, once, in order", WRONG_SHEETS, expected, f"{plane} %"
        )
    harness.claim("Both made the same sheets", DIFFERENT_SHEETS)
    harness.claim("All tasks are successful", "SELECT count(*) FROM django_pglock_task WHERE status <> 'SUCCESSFUL'")
    harness.claim("All requests are complete", "SELECT count(*) FROM handoff_request WHERE status <> 'complete'")
    harness.claim("No sheet has two creates", SECOND_CREATES)
    harness.claim("A run is one create, or updates of one sheet", MIXED_RUNS)
    for plane, statement in RUNS.items():
        grouped = f"SELECT (runs >= updates)::int FROM ({statement}) AS counted (updates, runs)"
        harness.claim(f"{TITLES[plane]}, updates of one sheet run together", grouped, "%update")


def requests(count: int, sheets: int) -> Iterator[Asked]:
    """Yield requests, always the same. The first of a sheet is its create, and one of twenty is a create again."""
    chance, created = random.Random(2018), set()
    for number in range(count):
        sheet = str(chance.randrange(sheets))
        if sheet not in created or chance.random() < 0.05:
            created.add(sheet)
            yield Asked("create", sheet)
        else:
            yield Asked("update", sheet, str(number))


def sheets_after(asked: Iterator[Asked]) -> dict[str, list[str]]:
    """Return the lines of each sheet after these requests."""
    sheets: dict[str, list[str]] = {}
    for each in asked:
        lines = sheets.setdefault(each.sheet, [])
        if each.kind == "update":
            lines.append(each.line)
    return sheets


def front_end(plane: str, count: int, sheets: int, half: int) -> None:
    """Hand over the requests for one half of the sheets, in their order."""
    mine = (each for each in requests(count, sheets) if int(each.sheet) % 2 == half)
    while some := [Asked(each.kind, f"{plane} {each.sheet}", each.line) for each in islice(mine, TOGETHER)]:
        if plane == "table":
            back_end.hand_over(*(Request(kind=each.kind, sheet=each.sheet, line=each.line) for each in some))
        else:
            for each in some:
                if each.kind == "create":
                    tasks.create.enqueue(sheet=each.sheet)
            updates = [{"sheet": each.sheet, "line": each.line} for each in some if each.kind == "update"]
            enqueue_many(tasks.update, updates)


def write_tables(count: int) -> None:
    """Write orders, two items of each, and one row of the other tables for each tenth: by the ORM, SQL and COPY."""
    orders = [order.pk for order in Order.objects.bulk_create(Order(text=f"order {n}") for n in range(count))]
    for number, part in enumerate(PARTS):
        table, name = part._meta.db_table, part.__name__
        some = orders * 2 if name == "Item" else orders[number % 10 :: 10]
        if number % 3 == 0:
            part.objects.bulk_create(part(order_id=order, text=f"{name} by the ORM") for order in some)
        elif number % 3 == 1:
            insert = f'INSERT INTO "{table}" (order_id, text) SELECT unnest(%s::bigint[]), %s'
            execute(insert, some, f"{name} by plain SQL")
        else:
            with connection.cursor() as cursor, cursor.copy(f'COPY "{table}" (order_id, text) FROM STDIN') as lines:
                lines.write("".join(f"{order}\t{name} by COPY\n" for order in some))


def roll_back() -> int:
    """Write an order with a part in each table, and roll that back. Return the id that the order had."""
    with transaction.atomic():
        order = Order.objects.create(text="never")
        for part in PARTS:
            part.objects.create(order=order, text="never")
        transaction.set_rollback(True)
    return int(order.pk)


def tasks_made(change: Callable[[], object]) -> int:
    """Return how many tasks a change makes."""
    before = Task.objects.count()
    change()
    return Task.objects.count() - before


def rows_written() -> int:
    """Return how many rows the 17 tables have."""
    return Order.objects.count() + sum(part.objects.count() for part in PARTS)


def execute(statement: str, *parameters: object) -> None:
    """Run a statement."""
    with connection.cursor() as cursor:
        cursor.execute(statement, parameters or None)


def rows_by_process(plane: str) -> list[tuple[int, list[int]]]:
    """Return processes, each with the ids of the rows that it holds now."""
    with connection.cursor() as cursor:
        cursor.execute(HELD_ROWS[plane])
        return list(cursor.fetchall())


def in_words(rows: list[int]) -> str:
    """Return the first of some ids, and how many others there are."""
    others = f" and {len(rows) - 5:,} others" if len(rows) > 5 else ""
    return ", ".join(map(str, rows[:5])) + others


def has_open_tasks() -> bool:
    """Return whether some task has not ended."""
    return Task.objects.exclude(status__in=FINISHED).exists()


def count_lines(plane: str) -> int:
    """Return how many lines the sheets of a plane have."""
    lines = Func("lines", function="jsonb_array_length", output_field=IntegerField())
    return Sheet.objects.filter(name__startswith=plane).aggregate(count=Sum(lines, default=0))["count"]


def runs_in_words(plane: str) -> str:
    """Say how many updates were handled in how many runs."""
    with connection.cursor() as cursor:
        cursor.execute(RUNS[plane], ["%update"])
        updates, runs = cursor.fetchone()
    return f"{updates:,} updates were handled in {runs:,} runs."


def pages_read(line: int) -> int:
    """Return how many pages the server reads when it searches for a request behind a line."""
    plan = back_end.oldest.filter(id__gt=line)[:1].explain(format="json", analyze=True, buffers=True)
    top = json.loads(plan)[0]["Plan"]
    return int(top["Shared Hit Blocks"] + top["Shared Read Blocks"])


@contextmanager
def old_snapshot() -> Iterator[None]:
    """Keep a transaction open that may still need every row as it is now."""
    other = connection.copy()
    try:
        with other.cursor() as cursor:
            cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            cursor.execute("SELECT count(*) FROM handoff_request")
            yield
    finally:
        other.close()
