"""A worker claims ready tasks of one queue. One statement makes each task RUNNING and counts one more attempt.

The set of claimable tasks is defined once, as a queryset. Django compiles it when the worker starts. From then on, a
claim only fills a few values into the compiled text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any
from uuid import UUID

from django.db import connections, models
from django.db.models import Exists, F, Q
from django.db.models.functions import Coalesce, Least, Now
from psycopg import ClientCursor

from django_pglock.postgres.connections import connection_for
from django_pglock.postgres.message import literals
from django_pglock.store.marking import first_free, marking_sql
from django_pglock.store.pause import paused
from django_pglock.store.plans import prepared
from django_pglock.store.ready import ready
from django_pglock.store.statements import MOST_ATTEMPTS, claim_columns, rows_of
from django_pglock.tasks.backends import our_backends
from django_pglock.tasks.claim import Claim
from django_pglock.tasks.queues import OWN_QUEUE
from django_pglock.tasks.states import TaskStatus

#: The placeholder of the limit in a statement that is compiled once and executed with many limits.
_ANY_LIMIT = 918_273_645


class ClaimStatement:
    """An UPDATE of claimed rows that is compiled and bound once, and executed with many limits.

    Nearly all values are known when the statement is compiled, so psycopg writes them into the text once. The server
    sees only literals. So it can use a partial index in every plan mode, and Python binds no values for a claim.
    ``PLACEHOLDERS`` in the queryset stand for the other values, which are filled in at each execution.
    """

    #: The placeholders: a name that no queue can have, and numbers. The last number is that of the limit.
    PLACEHOLDERS = ("\0name", 30_313, 918_273_646, _ANY_LIMIT)

    def __init__(self, rows: models.QuerySet[Any, Any], changes: dict[str, Any], returning: str) -> None:
        """Compile it. ``returning`` is SQL."""
        # FOR NO KEY UPDATE: a transaction that enqueues a task with ``after=`` has locked the key of the awaited task.
        sql, values = marking_sql(first_free(rows, _ANY_LIMIT, no_key=True), changes, returning)
        self._using = rows.db
        # Texts, and placeholders. A bound value that equals one of these is a text here.
        first, *others = sql.split("%s")
        self._pieces: list[str | int] = _cut_limit(first)
        with connections[rows.db].cursor() as cursor:
            bind = ClientCursor(cursor.connection).mogrify
            for value, text in zip(values, others, strict=True):
                self._pieces.append(value if value in self.PLACEHOLDERS else bind("%s", [value]))
                self._pieces += _cut_limit(text)
        self._placeholders = [each for each in self.PLACEHOLDERS if each in self._pieces]
        self._preparable = self._filled([f"${place}" for place in range(1, len(self._placeholders) + 1)])

    def _filled(self, values: Sequence[str]) -> str:
        known: dict[str | int, str] = dict(zip(self._placeholders, values, strict=True))
        return "".join(known.get(piece, str(piece)) for piece in self._pieces)

    def sql(self, limit: int, *values: str | int) -> str:
        """Return the statement with its placeholders filled in. The connection has to be open."""
        return self._filled(literals(connection_for(self._using), (*values, limit)))

    def execute(self, limit: int, *values: str | int) -> list[tuple[Any, ...]]:
        """Claim up to ``limit`` rows on this thread's connection; return their columns, in no order."""
        with connections[self._using].cursor() as cursor:
            cursor.execute(prepared(cursor, self._preparable, *values, limit) or self.sql(limit, *values))
            rows: list[tuple[Any, ...]] = cursor.fetchall()
        return rows


def claim_statement(
    using: str, *, worker: UUID, paths: Sequence[str], behind: bool = False, backend: str | None = None
) -> ClaimStatement:
    """Return the statement that claims tasks of a queue for a worker.

    - ``paths``: the functions that the worker knows. Tasks of other functions are not claimed.
    - ``backend``: the alias in TASKS with which the tasks were enqueued; None: any.
    - ``behind``: claim only tasks of one priority that were enqueued after one task.

    ``execute()`` fills in the name of the queue and, with ``behind``, the priority and the id.
    """
    queue, priority, id_, _ = ClaimStatement.PLACEHOLDERS
    # Django has no SQL for an empty list. No function has an empty path.
    claimable = ready(rows_of("Task", using)).filter(queue=queue, task_path__in=paths or [""], fair_key__isnull=True)
    if behind:
        claimable = claimable.filter(priority=priority, id__gt=id_)
    if backend is not None:
        # Projects may share a database, each with a backend. Of this package's own tasks, a worker runs its project's.
        known = [each.alias for each in our_backends() if each.database == using]
        claimable = claimable.filter(Q(backend=backend) | Q(queue=OWN_QUEUE, backend__in=known))
    changes = {
        "status": TaskStatus.RUNNING,
        "attempts": Least(F("attempts"), MOST_ATTEMPTS) + 1,
        "worker": worker,
        "started_at": Coalesce("started_at", Now()),
        "last_attempted_at": Now(),
    }
    returning = claim_columns(connections[using].ops.quote_name)
    is_paused = Exists(paused(rows_of("Queue", using)).filter(name=queue))
    return ClaimStatement(claimable.filter(~is_paused), changes, returning)


def claims_of(rows: Iterable[tuple[Any, ...]], worker: UUID) -> list[Claim]:
    """Return the rows of a claiming statement as claims, in the order in which they run."""
    # All columns are named, because to pass the others as ``*others`` takes 1.5 times as long for a thousand claims.
    claims = [
        Claim(
            id_, attempt, worker, backend, queue, priority, path, args, kwargs, meta, retries, max_retries, rescues,
            run_after, enqueued_at, started_at, last_attempted_at, lock_key, uncounted,
        )
        for (
            id_, attempt, backend, queue, priority, path, args, kwargs, meta, retries, max_retries, rescues,
            run_after, enqueued_at, started_at, last_attempted_at, lock_key, uncounted,
        ) in rows
    ]  # fmt: skip
    # Two sorts, because a sort by one attribute calls no Python function. The second one is stable: tasks of the same
    # priority keep the order of their ids.
    claims.sort(key=attrgetter("id"))
    claims.sort(key=attrgetter("priority"), reverse=True)
    return claims


def _cut_limit(sql: str) -> list[str | int]:
    # Django writes the limit into the text.
    before, limit, after = sql.partition(str(_ANY_LIMIT))
    return [before, _ANY_LIMIT, after] if limit else [before]
