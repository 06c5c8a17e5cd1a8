"""Fixtures for the tests of single verbs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from uuid import UUID, uuid4

import pytest

from django_pglock.models import Task
from django_pglock.postgres.sessions import dedicated_connection
from django_pglock.store.claim import claim_statement, claims_of
from django_pglock.tasks.claim import Claim
from tests.sample import tasks


@pytest.fixture
def slow_beats(settings: Any) -> None:
    """Heartbeats every ten minutes, so that no worker counts as dead on a slow machine."""
    settings.DJANGO_PGLOCK = {**settings.DJANGO_PGLOCK, "HEARTBEAT_INTERVAL": 600.0}


@pytest.fixture
def claim() -> Callable[..., list[Claim]]:
    """Claim tasks as a worker does."""

    def take(limit: int = 1, *, worker: UUID | None = None, queue: str = "default") -> list[Claim]:
        worker = worker or uuid4()
        paths = list(Task.objects.values_list("task_path", flat=True).distinct().order_by("task_path"))
        return claims_of(claim_statement("default", worker=worker, paths=paths).execute(limit, queue), worker)

    return take


@pytest.fixture
def mine(claim: Callable[..., list[Claim]]) -> Claim:
    """Return a claim of a running task, and its worker."""
    tasks.nothing.enqueue()
    [claimed] = claim()
    return claimed


@pytest.fixture
def locked() -> Callable[[int | str], AbstractContextManager[None]]:
    """Lock the row of a task in an open transaction of another session during a block."""

    @contextmanager
    def lock(task_id: int | str) -> Iterator[None]:
        connection = dedicated_connection("default")
        try:
            with connection.cursor() as cursor:
                cursor.execute("BEGIN")
                cursor.execute("SELECT FROM django_pglock_task WHERE id = %s FOR UPDATE", [int(task_id)])
                yield
                # The server notices the end of a session later than its client.
                cursor.execute("ROLLBACK")
        finally:
            connection.close()

    return lock


@pytest.fixture
def finished(eventually):
    """Wait until a result is finished and return it as it is then."""

    def wait(result):
        def look():
            result.refresh()
            return result.is_finished

        eventually(look, why=f"task {result.id} never finished")
        return result

    return wait
