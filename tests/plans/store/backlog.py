"""A table with a backlog, and the plans of the statements beside it: executed once for all tests of a process.

To insert the backlog takes longer than to execute all plans, so the first test that asks for a plan executes all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple
from uuid import UUID, uuid4

from django.db import connection
from django.db.models.functions import Now

from django_pglock.models import Step, Task, Waiter, Worker
from django_pglock.store.statements import array_of_numbers
from tests.plans.reading import BATCH, delete_all, executed, insert, pages_read, rows_read
from tests.sql import execute_sql

#: Kinds of statistics: of a new table, of a table that was empty once, of a table whose rows had been deleted, of the
#: history alone, and of all but the running tasks of other workers. The planner takes the number of rows on a page from
#: the statistics. So if all rows had been deleted, it expects one row, however many pages there are.
STATISTICS = ("none", "of an empty table", "of an emptied table", "from before", "of now")

#: The tables that have many rows, and statistics of each kind.
TABLES = ("django_pglock_task", "django_pglock_attempt", "django_pglock_waiter")
ATTEMPTS = """
INSERT INTO django_pglock_attempt (task_id, number, started_at, finished_at, outcome, exception_path, traceback,
                                   cause)
SELECT id, 1, now(), now(), 'FAILED', 'x', 'x', id FROM django_pglock_task
"""

#: Buckets of ``rate=`` whose keys come before all others, in a table that had none when it was analyzed. Its one page
#: makes the planner expect none on further pages either.
BUCKETS = (
    # Statements would read the dead rows that other tests have left.
    "TRUNCATE django_pglock_ratelimit, django_pglock_waiter, django_pglock_attempt",
    "INSERT INTO django_pglock_ratelimit (key, arrives_at) VALUES ('0', now())",
    "DELETE FROM django_pglock_ratelimit",
    "ANALYZE django_pglock_ratelimit",
    "INSERT INTO django_pglock_ratelimit (key, arrives_at) SELECT '0 ' || n, now() FROM generate_series(1, 20000) AS n",
)


#: Tasks that wait for events, and events that have come, in tables that were empty when they were analyzed.
STEPS = (
    "TRUNCATE django_pglock_step, django_pglock_event",
    "ANALYZE django_pglock_step, django_pglock_event",
    """INSERT INTO django_pglock_step (task_id, name, number, kind, event, attempt, started_at)
       SELECT 1000000000 + n, 'wait', 1, 'EVENT', 'awaited ' || n, 1, now() FROM generate_series(1, 20000) AS n""",
    """INSERT INTO django_pglock_event (name, payload, emitted_at, expires_at)
       SELECT 'came ' || n, '1', now(), now() + interval '1 day' FROM generate_series(1, 20000) AS n""",
    """INSERT INTO django_pglock_step (task_id, name, number, kind, result, attempt, started_at)
       SELECT 2000000000 + n, 'children', 1, 'CHILDREN', '{"children": [1]}', 1, now()
       FROM generate_series(1, 20000) AS n""",
)


@dataclass(frozen=True)
class Backlog:
    """What is in the table besides the history and what waits."""

    #: The worker that runs ``BATCH`` tasks.
    worker: UUID
    #: The tasks that it runs, in order.
    ids: list[int]
    #: The oldest task, which has failed.
    first: int
    #: Tasks that have ended, and for which others wait.
    awaited: list[int]
    #: A task of the lock key ``gathered`` that waits for the worker's tasks, its children.
    gathering: int

    @property
    def array(self) -> str:
        """The tasks that the worker runs, as PostgreSQL writes an array."""
        return array_of_numbers(self.ids)

    @property
    def ones(self) -> list[int]:
        """The attempts of these tasks."""
        return [1] * len(self.ids)

    @property
    def texts(self) -> list[str]:
        """A JSON text for each of them."""
        return ["null"] * len(self.ids)


class Call(NamedTuple):
    """A statement with its values. ``by_index``: it walks indexes in their order, as in admission and upkeep."""

    statement: str
    values: Any = None
    by_index: bool = False


class Plans(dict[str, Any]):
    """The plans of the calls of one verb, by their names."""

    def check(self, *, rows: int = 30 * BATCH, pages: int = 600) -> None:
        """Check that no statement reads more of the table than it needs, and that none is compiled by JIT."""
        assert self, "no statement was executed"
        read = {name: (rows_read(plan), pages_read(plan)) for name, plan in self.items()}
        much = {name: counts for name, counts in read.items() if counts[0] > rows or counts[1] > pages}
        assert much == {}, f"rows and pages that were read: {much}"
        # Servers before 18 give a disabled sort such a high cost that they would compile the statement.
        assert [name for name, plan in self.items() if "JIT" in plan[0]] == []


@cache
def plans_beside_backlog(verbs: tuple[Callable[[Backlog], dict[str, Call]], ...]) -> Mapping[str, Mapping[Any, Plans]]:
    """Fill the table, which has to be new; return the plans by the kind of statistics and the verb."""
    backlog, statistics = _fill()
    calls = {verb: verb(backlog) for verb in verbs}
    found: dict[str, Mapping[Any, Plans]] = {}
    for kind in STATISTICS:
        statistics.restore(kind)
        found[kind] = {
            verb: Plans(
                {name: executed(call.statement, call.values, by_index=call.by_index) for name, call in each.items()}
            )
            for verb, each in calls.items()
        }
    return found


def _fill() -> tuple[Backlog, _Statistics]:
    """Insert a long history, twenty thousand tasks that wait for one key, as many for a date, and a few others.

    A settle that read all running tasks of a fleet took seven times as long beside a hundred thousand of them, so ten
    other workers run five hundred tasks each. Tasks of the lock key ``for later`` are scheduled. Each task of ``after
    others``, except for the last one, waits for a task that has ended and for a running task. The last task of
    ``gathered`` waits for its children, and keeps the key.
    """
    with connection.cursor() as cursor:
        for statement in (*BUCKETS, *STEPS):
            cursor.execute(statement)
    statistics, worker = _Statistics(), uuid4()
    statistics.keep("none")
    _analyze()
    statistics.keep("of an empty table")
    insert("SUCCESSFUL", 1000)
    _insert_others()
    delete_all(*TABLES)
    statistics.keep("of an emptied table")
    insert("SUCCESSFUL", 20_000)
    _insert_others()
    _analyze()
    statistics.keep("from before")
    insert("BLOCKED", 20_000, lock="backlog")
    insert("SCHEDULED", 20_000, seconds=60)
    insert("READY", BATCH)
    insert("READY", BATCH, fair="tenant")
    insert("RUNNING", BATCH, worker=worker)
    ids = list(Task.objects.filter(status="RUNNING").order_by("pk").values_list("pk", flat=True))
    for before, id_ in pairwise(ids):
        Task.objects.filter(pk=id_).update(meta={"previous_run": before})
    first = Task.objects.earliest("pk").pk
    Task.objects.filter(pk=first).update(status="FAILED")
    _analyze()
    statistics.keep("of now")
    for living in Worker.objects.bulk_create(
        Worker(id=uuid4(), parent=uuid4(), pid=1, threads=1, queues=[]) for _ in range(BATCH)
    ):
        insert("RUNNING", 500, worker=living.pk)
    insert("BLOCKED", BATCH, lock="for later")
    insert("SCHEDULED", 10_000, lock="for later", seconds=60)
    awaited = list(Task.objects.filter(status="SUCCESSFUL").order_by("-pk").values_list("pk", flat=True)[:BATCH])
    insert("BLOCKED", BATCH, lock="after others")
    behind = Task.objects.filter(lock_key="after others").order_by("pk")
    for task, id_ in zip(behind[: BATCH - 1], awaited, strict=False):
        Task.objects.filter(pk=task.pk).update(waits_for=2)
        Waiter.objects.bulk_create([Waiter(awaited=id_, task=task), Waiter(awaited=ids[0], task=task)])
    insert("BLOCKED", 20_000, lock="gathered")
    gathering = Task.objects.filter(lock_key="gathered").latest("pk")
    Task.objects.filter(pk=gathering.pk).update(worker=worker, waits_for=BATCH)
    Waiter.objects.bulk_create(Waiter(awaited=id_, task=gathering, has_ended=False) for id_ in ids)
    Step.objects.create(
        task=gathering,
        name="children",
        number=1,
        kind="CHILDREN",
        result={"children": ids},
        attempt=1,
        started_at=Now(),
    )
    return Backlog(worker, ids, first, awaited, gathering.pk), statistics


def _insert_others() -> None:
    """Insert an attempt of each finished task, and a process that waits for it."""
    with connection.cursor() as cursor:
        cursor.execute(ATTEMPTS)
        cursor.execute("INSERT INTO django_pglock_waiter (awaited) SELECT id FROM django_pglock_task")


def _analyze() -> None:
    execute_sql(f"ANALYZE {', '.join(TABLES)}")


class _Statistics:
    """The statistics of the tables at several moments, any of which can be made the present ones."""

    #: What PostgreSQL has noted of the tables and their indexes.
    NOTED = """
        SELECT relpages, reltuples, relallvisible, oid FROM pg_class
        WHERE oid = ANY (%s::oid[]) OR oid IN (SELECT indexrelid FROM pg_index WHERE indrelid = ANY (%s::oid[]))
    """
    NOTE = "UPDATE pg_class SET relpages = %s, reltuples = %s, relallvisible = %s WHERE oid = %s"
    #: Copies of the statistics of columns cannot be inserted, so they are given to a table that does not exist.
    GIVE = "UPDATE pg_statistic SET starelid = %s WHERE starelid = %s"

    def __init__(self) -> None:
        self.noted: dict[str, list[tuple[Any, ...]]] = {}
        self.tables = [
            table
            for (table,) in execute_sql("SELECT name::regclass::oid FROM unnest(%s::text[]) AS name", [list(TABLES)])
        ]
        self.present: str | None = None

    def keep(self, kind: str) -> None:
        self.noted[kind] = execute_sql(self.NOTED, [self.tables, self.tables])
        self.present = kind
        self._put_away()

    def restore(self, kind: str) -> None:
        self._put_away()
        with connection.cursor() as cursor:
            cursor.executemany(self.NOTE, self.noted[kind])
            cursor.executemany(self.GIVE, [(table, self._absent(kind, table)) for table in self.tables])
        self.present = kind

    def _put_away(self) -> None:
        if self.present is not None:
            with connection.cursor() as cursor:
                cursor.executemany(self.GIVE, [(self._absent(self.present, table), table) for table in self.tables])
            self.present = None

    def _absent(self, kind: str, table: int) -> int:
        return 1 + self.tables.index(table) * len(STATISTICS) + STATISTICS.index(kind)
