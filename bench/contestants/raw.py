"""A loop of raw psycopg on our own table: about the limit of what a queue in Python could do. It runs nothing.

The worker claims 500 rows and settles them, one statement each. With ``--one`` it is what ``atomic=True`` is measured
against: a transaction a task, in which one is claimed and settled.
"""

from __future__ import annotations

import uuid
from typing import Any

from bench.contestants import django_project
from bench.contestants.base import Contestant, main
from bench.contestants.ours import Ours

PATH = "bench.app.tasks.nothing"
CLAIM = """
WITH claimed AS MATERIALIZED (
    SELECT id FROM django_pglock_task WHERE status = 'READY' AND queue = 'default' AND fair_key IS NULL
    ORDER BY priority DESC, id LIMIT {limit} FOR UPDATE SKIP LOCKED)
UPDATE django_pglock_task AS t SET status = 'RUNNING', attempts = attempts + 1, worker = %s, last_attempted_at = now()
FROM claimed WHERE t.id = claimed.id RETURNING t.id, t.attempts, t.args, t.kwargs
"""
SETTLE = """
UPDATE django_pglock_task AS t SET status = 'SUCCESSFUL', finished_at = now()
FROM unnest(%s::bigint[], %s::int[]) AS o (id, attempt)
WHERE t.id = o.id AND t.attempts = o.attempt AND t.status = 'RUNNING'
"""
# What our own enqueueing writes, column by column.
COLUMNS = "status, run_after, queue, priority, task_path, args, kwargs, backend, max_retries, meta"
ROW = ("READY", None, "default", 0, PATH, "[]", "{}", "default", 0, "{}")
INSERT = f"""
INSERT INTO django_pglock_task ({COLUMNS}) VALUES (%s, %s, %s, %s, %s, %s::jsonb, %s::jsonb, %s, %s, %s::jsonb)
RETURNING id, status, run_after, enqueued_at
"""


class Raw(Contestant):
    name = "raw psycopg"
    unfinished = Ours.unfinished

    @property
    def environment(self) -> dict[str, str]:
        return {"DJANGO_SETTINGS_MODULE": "bench.app.settings", "BENCH_CONTESTANT": "ours"}

    def version(self) -> str:
        return ""


def cursor() -> Any:
    import psycopg

    return psycopg.connect(autocommit=True).cursor()


def setup() -> None:
    django_project.begin()
    django_project.setup()


def inserting() -> Any:
    """Return what enqueues one, on a connection that stays."""
    execute = cursor().execute

    def one(function: str) -> None:
        execute(INSERT, ROW).fetchone()

    return one


def many(count: int, function: str) -> None:
    with cursor().copy(f"COPY django_pglock_task ({COLUMNS}) FROM STDIN") as copy:
        for _ in range(count):
            copy.write_row(ROW)


def worker(option: str = "") -> None:
    work, me = cursor(), uuid.uuid4()
    # A limit is not to depend on the number of rows: with 60,000 the planner reads the whole table for each claim, and
    # the loop runs at two thirds of what it does with 100,000.
    work.execute("SET enable_seqscan = off")
    if option == "--one":
        claim = CLAIM.format(limit=1)
        is_working = True
        while is_working:
            with work.connection.transaction():
                is_working = settle(work, work.execute(claim, (me,)).fetchall())
    else:
        while settle(work, work.execute(CLAIM.format(limit=500), (me,)).fetchall()):
            pass


def settle(work: Any, rows: list[Any]) -> bool:
    if rows:
        work.execute(SETTLE, ([row[0] for row in rows], [row[1] for row in rows]))
    return bool(rows)


if __name__ == "__main__":
    main(setup=setup, one=inserting(), many=many, worker=worker)
