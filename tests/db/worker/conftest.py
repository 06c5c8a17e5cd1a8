"""What the tests of the worker may use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from django.db import connection

from django_pglock.models import Task
from django_pglock.worker.child.claimer import Claimer
from django_pglock.worker.child.feeder import Feeder, ParentsHeartbeat
from django_pglock.worker.child.in_flight import InFlight
from django_pglock.worker.parent.upkeep import Upkeep
from django_pglock.worker.queues import Queues
from tests.in_process import InProcessWorker
from tests.sample.models import Effect
from tests.sql import execute_sql


@pytest.fixture
def gate():
    """Keep ``running_tasks.wait_for_note`` running until the note is there."""
    yield lambda: Effect.objects.create(name="go on")
    Effect.objects.create(name="go on")


class Refusing:
    """A trigger on the table of tasks that refuses successes, until it is stopped."""

    def __init__(self) -> None:
        self.is_on = False

    def __call__(self, code: str, condition: str = "true") -> None:
        with connection.cursor() as cursor:
            cursor.execute(
                "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
                f"$$ BEGIN RAISE 'refused' USING ERRCODE = '{code}'; END $$"
            )
            cursor.execute(
                "CREATE TRIGGER refuse BEFORE UPDATE ON django_pglock_task FOR EACH ROW "
                f"WHEN (NEW.status = 'SUCCESSFUL' AND {condition}) EXECUTE FUNCTION refuse()"
            )
        self.is_on = True

    def stop(self) -> None:
        if self.is_on:
            execute_sql("DROP FUNCTION refuse() CASCADE")
        self.is_on = False


@pytest.fixture
def refusing(transactional_db: None) -> Iterator[Refusing]:
    refusing = Refusing()
    yield refusing
    refusing.stop()


def make_feeder(**options: Any) -> Feeder:
    """Return the feeder of a child that does not run."""
    claimer = Claimer("default", uuid4(), Queues(**options))
    return Feeder(InFlight(4, queues=claimer.queues), claimer, heartbeat=ParentsHeartbeat())


def make_upkeep(*, unbroken_for: float = 0.0, is_quiet: bool = False, older_parents: int = 0) -> Upkeep:
    """Return the upkeep of a parent whose heartbeat is made up."""
    heartbeat: Any = SimpleNamespace(
        unbroken_for=lambda: unbroken_for,
        is_quiet=is_quiet,
        older_parents=older_parents,
        ready_queues={"default"},
        note_promoted=lambda: None,
    )
    return Upkeep("default", heartbeat)


def run_to_its_end(**options: Any) -> InProcessWorker:
    """Run a worker that ends by itself."""
    worker = InProcessWorker(**{"threads": 2, "grace": 5, **options})
    worker.run_here()
    assert not worker.is_running, "it did not end"
    return worker


def statuses() -> dict[str, int]:
    """Count the tasks by status."""
    found = list(Task.objects.values_list("status", flat=True))
    return {status: found.count(status) for status in found}


def wait_for_end(result: Any, eventually: Callable[..., Any]) -> Task:
    """Wait until the task of a result has ended, and return its row."""
    rows = Task.objects.filter(pk=result.id, finished_at__isnull=False)
    row: Task = eventually(lambda: rows.first(), why=f"task {result.id} did not end")
    return row
