"""The small worlds in which verbs meet: a few rows in every state, with one kind of key each.

A world is built once by the verbs themselves, and copied into tables of its own. Each case takes its rows from there.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from uuid import UUID

from django.db import connection, models
from django.db.models import F
from django.db.models.functions import Now

from django_pglock.models import (
    Attempt,
    Event,
    Number,
    Queue,
    RateLimit,
    Schedule,
    Step,
    Task,
    Waiter,
    Worker,
)
from django_pglock.store.admit import admit
from django_pglock.store.outcome import Failed, Failure, Succeeded
from django_pglock.store.release import release
from django_pglock.store.settle import settle
from django_pglock.store.statements import run
from django_pglock.tasks.claim import Claim
from tests.property.simulation import beat_of
from tests.sample import keyed_tasks as keyed
from tests.sample import tasks

#: The worker whose claims the verbs settle; one that has died; one that sleeps; and those that claim.
LIVING, DEAD, SLEEPING, FIRST, SECOND, THIRD = (UUID(int=number) for number in range(1, 7))
FIELDS = Task._meta.concrete_fields
NAMES = [each.attname for each in FIELDS]
PK = NAMES.index("id")
#: The columns of JSON. Sessions of Django return it as text.
JSON = {number for number, each in enumerate(FIELDS) if isinstance(each, models.JSONField)}
MODELS = (Worker, Queue, Number, RateLimit, Schedule, Task, Attempt, Waiter, Step, Event)
TABLES = [each._meta.db_table for each in MODELS]
FAILED = Failed(Failure("builtins.ValueError", "Traceback …"))
#: Waits for a place at its key, and can be replaced while it does.
amend = keyed.save.using(lock="order:{text}")
CLAIM_OF = "SELECT {claim_columns} FROM {task} AS task WHERE id = %s"
#: Cases after which the tables are made anew, because all rows that have been there are read again and again.
MADE_ANEW_EVERY = 150


@dataclass
class World:
    """Rows to begin with, and the claims that are held on some of them."""

    name: str
    build: Callable[[World], None]
    claims: list[Claim] = field(default_factory=list)
    zombies: list[Claim] = field(default_factory=list)
    parents: set[int] = field(default_factory=set)
    before: dict[int, Task] = field(default_factory=dict)
    #: What the world's own verbs and laws have to know.
    facts: dict[str, Any] = field(default_factory=dict)
    _resets: int = 0
    #: The tasks that a judge has read last: most rows of a case are as in the case before.
    _read: dict[int, tuple[tuple[Any, ...], Task]] = field(default_factory=dict)

    def make(self) -> None:
        """Build the world and keep a copy of it."""
        empty()
        for worker in (LIVING, SLEEPING, FIRST, SECOND, THIRD):
            beat_of(worker)
        Worker.objects.filter(pk=SLEEPING).update(is_sleeping=True)
        Queue.objects.create(name="default")
        self.build(self)
        self.before = {task.pk: task for task in Task.objects.order_by("pk")}
        with connection.cursor() as cursor:
            for table in TABLES:
                cursor.execute(f"CREATE TABLE {self._copy(table)} AS TABLE {table}")
            # A function keeps the plans of its statements.
            statements = [f"DELETE FROM {table};" for table in reversed(TABLES)] + [
                f"INSERT INTO {table} OVERRIDING SYSTEM VALUE TABLE {self._copy(table)};" for table in TABLES
            ]
            cursor.execute(
                f"CREATE PROCEDURE {self._procedure}() LANGUAGE plpgsql AS $$BEGIN {' '.join(statements)} END$$"
            )

    def reset(self) -> None:
        """Put its rows back, and nothing else."""
        self._resets += 1
        with connection.cursor() as cursor:
            if self._resets % MADE_ANEW_EVERY == 0:
                cursor.execute(f"TRUNCATE {', '.join(TABLES)}")
            cursor.execute(f"CALL {self._procedure}()")

    def task_of(self, row: tuple[Any, ...]) -> Task:
        """Return the task of a row. It is the same object as before if the row has not changed."""
        pk = row[PK]
        if pk not in self._read or self._read[pk][0] != row:
            values = [
                json.loads(value) if number in JSON and value is not None else value for number, value in enumerate(row)
            ]
            self._read[pk] = row, Task.from_db("default", NAMES, values)
        return self._read[pk][1]

    def drop(self) -> None:
        """Drop the copy."""
        with connection.cursor() as cursor:
            cursor.execute(f"DROP PROCEDURE {self._procedure}()")
            cursor.execute(f"DROP TABLE {', '.join(map(self._copy, TABLES))}")

    def running(self, task: Any, *args: Any, worker: UUID = LIVING, **kwargs: Any) -> Claim:
        """Enqueue a task and let a worker claim it."""
        return self.claimed(int(task.enqueue(*args, **kwargs).id), worker=worker)

    def claimed(self, pk: int, worker: UUID = LIVING) -> Claim:
        """Let a worker claim a task."""
        claimed = Task.objects.filter(pk=pk, status="READY").update(
            status="RUNNING", attempts=F("attempts") + 1, worker=worker, started_at=Now(), last_attempted_at=Now()
        )
        assert claimed, "the first of its key"
        [(id_, attempt, *rest)] = run("default", CLAIM_OF, pk)
        claim = Claim(id_, attempt, worker, *rest)
        (self.zombies if worker == DEAD else self.claims).append(claim)
        return claim

    @property
    def _procedure(self) -> str:
        return f"reset_{self.name}"

    def _copy(self, table: str) -> str:
        return f"copy_{self.name}_{table}"


def empty() -> None:
    """Delete all rows."""
    with connection.cursor() as cursor:
        cursor.execute(f"TRUNCATE {', '.join(TABLES)}")


def ended(world: World, task: Any, *args: Any, outcome: Any = FAILED, **kwargs: Any) -> int:
    """Enqueue a task that has run and ended."""
    claim = world.running(task, *args, **kwargs)
    world.claims.remove(claim)
    settle("default", [(claim, outcome)], LIVING)
    release("default", [claim.id])
    admit("default", [claim.lock_key])
    return claim.id


def plain(world: World) -> None:
    tasks.nothing.enqueue()
    tasks.nothing.using(priority=5).enqueue()
    world.running(tasks.nothing)
    asked = world.running(tasks.nothing)
    Task.objects.filter(pk=asked.id).update(cancel_requested_at=Now())
    world.running(tasks.nothing, worker=DEAD)
    later = tasks.nothing.using(run_after=timedelta(hours=1))
    due = later.enqueue()
    Task.objects.filter(pk=due.id).update(run_after=Now())
    later.enqueue()
    ended(world, tasks.nothing)
    ended(world, tasks.nothing.using(keep_result=0), outcome=Succeeded())
    Task.objects.filter(pk=tasks.nothing.enqueue().id).cancel()


def key(world: World) -> None:
    world.running(keyed.step, "a")
    keyed.step.enqueue("a")
    keyed.step.enqueue("a")
    world.running(keyed.step, "b", worker=DEAD)
    keyed.step.enqueue("b")
    keyed.step.enqueue("c")
    keyed.step.enqueue("c")
    ended(world, keyed.step, "d")
    retried = world.running(keyed.step, "e")
    keyed.step.enqueue("e")
    world.claims.remove(retried)
    Task.objects.filter(pk=retried.id).update(status="SCHEDULED", run_after=Now(), worker=None)
    due = keyed.step.using(run_after=timedelta(hours=1)).enqueue("a")
    Task.objects.filter(pk=due.id).update(run_after=Now())


def concurrent(world: World) -> None:
    world.running(keyed.call, "x")
    world.running(keyed.call, "x", worker=DEAD)
    for _ in range(3):
        keyed.call.enqueue("x")
    ended(world, keyed.call, "y")


def unique(world: World) -> None:
    ended(world, keyed.rebuild, 2)
    ended(world, keyed.refresh, 3)
    ended(world, keyed.refresh, 1)
    ended(world, keyed.remind, 1, outcome=Succeeded())
    Task.objects.filter(unique_until__isnull=False).update(unique_until=Now())
    keyed.refresh.enqueue(1)
    world.running(keyed.rebuild, 1)
    world.running(keyed.refresh, 4, worker=DEAD)
    world.running(keyed.step, "x")
    keyed.save.enqueue(1, text="x")
    amend.enqueue(2, text="x")
    keyed.step.enqueue("x")


def after(world: World) -> None:
    first = world.running(tasks.nothing).id
    second = int(tasks.nothing.enqueue().id)
    dead = world.running(keyed.step, "p", worker=DEAD).id
    world.parents = {first, second}
    child = keyed.step.using(after={first}).enqueue("a")
    tasks.nothing.using(after={first, second}).enqueue()
    tasks.nothing.using(after={dead, int(child.id)}).enqueue()
    failed = int(tasks.nothing.enqueue().id)
    tasks.nothing.using(after={failed}).enqueue()
    Task.objects.filter(pk=failed).cancel()
    keyed.step.enqueue("a")


def group(world: World) -> None:
    for _ in range(3):
        keyed.digest.enqueue(user=1, text="")
    world.running(keyed.digest, user=2, text="")
    keyed.digest.enqueue(user=2, text="")
    world.running(keyed.digest, user=3, text="", worker=DEAD)
    keyed.digest.enqueue(user=3, text="")
    for author in (1, 1, 2):
        keyed.note.enqueue(order_id="a", author=author, text="")
    ended(world, keyed.digest, user=4, text="")


def shared(world: World) -> None:
    world.running(keyed.trickle, "a")
    for _ in range(3):
        keyed.trickle.enqueue("a")
    world.running(keyed.trickle, "b", worker=DEAD)
    RateLimit.objects.filter(opens_at__isnull=False).update(opens_at=Now(), arrives_at=Now())
    world.running(keyed.serve, "m")
    for tenant in "mno":
        keyed.serve.enqueue(tenant)
    ended(world, keyed.trickle, "c")


BUILDS = (plain, key, concurrent, unique, after, group, shared)
