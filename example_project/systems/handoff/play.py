"""The play of this system: the same requests through tasks and through the table, with kills of back ends."""

from __future__ import annotations

import json
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

from django.db import connection
from django.db.models import Func, IntegerField, Sum

from django_pglock import enqueue_many
from django_pglock.models import Attempt, Task
from django_pglock.tasks.states import FINISHED
from example_project.systems.handoff import back_end, tasks
from example_project.systems.handoff.models import Request, Sheet
from example_project.systems.stage import Stage

REQUESTS, SHEETS = 10_000, 300
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


@dataclass(frozen=True)
class Asked:
    """One request of a user."""

    kind: str
    sheet: str
    line: str = ""


def play(stage: Stage, count: int = REQUESTS, sheets: int = SHEETS) -> None:
    """Send the requests through both planes, and claim that they made the same sheets."""
    stage.say(
        f"{count:,} requests for {sheets} sheets: creates, updates, and creates that were clicked again. "
        "Another transaction\nstays open all the time, so that no dead row can be removed."
    )
    with old_snapshot():
        stage.say("\nWith tasks. Half of the requests are handed over before the workers start.")
        worker = ("runlockworker", "--threads", "4", "--no-reload")
        run(stage, "tasks", count, sheets, lambda: stage.fleet.start(*worker), has_open_tasks)
        lost = Attempt.objects.filter(outcome="LOST").count()
        stage.say(f"  {lost} tasks were taken back from killed workers. {runs_in_words('tasks')}")
        stage.say("\nWith a table and ClaimManager. Half of the requests are handed over before the back ends start.")
        run(stage, "table", count, sheets, lambda: stage.call(back_end.serve), back_end.new.exists)
        stage.say(f"  {runs_in_words('table')}")
        behind = Request.objects.latest("id").id
        stage.say(
            f"  Below the open transaction, a search from the start reads {pages_read(0):,} pages, and one behind the "
            f"line in the sand {pages_read(behind)}."
        )
    claim(stage, count, sheets)


def run(
    stage: Stage,
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
    front = stage.call(front_end, plane, count, sheets, 1)
    while kills or front.poll() is None or has_open():
        lines = count_lines(plane)
        stage.screen.progress(lines, updates, "lines in the sheets")
        if kills and lines >= kills[0]:
            kills.pop(0)
            victim = back_ends.pop(0)
            victim.kill()
            victim.wait()
            stage.say(f"  A back end (process {victim.pid}) was killed with SIGKILL, and another one starts.")
            back_ends.append(start())
        for process in back_ends:
            stage.fleet.require_running(process)
        if time.monotonic() > began + NEVER:
            raise TimeoutError(f"Some requests are never handled.\n{stage.fleet.output()}")
        time.sleep(0.2)
    if front.returncode:
        raise RuntimeError(f"The front end has failed.\n{stage.fleet.output()}")
    note = f"lines in the sheets after {time.monotonic() - began:.1f} s"
    stage.screen.progress(count_lines(plane), updates, note, is_last=True)
    for process in back_ends:
        process.terminate()


def claim(stage: Stage, count: int, sheets: int) -> None:
    """Claim what holds now."""
    expected = json.dumps(sheets_after(requests(count, sheets)))
    for plane in RUNS:
        stage.claim(f"{TITLES[plane]}, each line is in its sheet, once, in order", WRONG_SHEETS, expected, f"{plane} %")
    stage.claim("Both made the same sheets", DIFFERENT_SHEETS)
    stage.claim("All tasks are successful", "SELECT count(*) FROM django_pglock_task WHERE status <> 'SUCCESSFUL'")
    stage.claim("All requests are complete", "SELECT count(*) FROM handoff_request WHERE status <> 'complete'")
    stage.claim("No sheet has two creates", SECOND_CREATES)
    stage.claim("A run is one create, or updates of one sheet", MIXED_RUNS)
    for plane, statement in RUNS.items():
        grouped = f"SELECT (runs >= updates)::int FROM ({statement}) AS counted (updates, runs)"
        stage.claim(f"{TITLES[plane]}, updates of one sheet run together", grouped, "%update")


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


def has_open_tasks() -> bool:
    """Say whether some task has not ended."""
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
