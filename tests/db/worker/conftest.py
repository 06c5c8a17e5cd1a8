"""What the tests of the worker may use."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from django_pglock.models import Task
from django_pglock.worker import Worker
from tests.conftest import postpone_heartbeat_process
from tests.sample.models import Effect


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


@pytest.fixture
def gate():
    """Keep ``running_tasks.wait_for_note`` running until the note is there."""
    yield lambda: Effect.objects.create(name="go on")
    Effect.objects.create(name="go on")


def run_to_its_end(**options: Any) -> Worker:
    """Run a worker that ends by itself."""
    worker = Worker(threads=2, grace=5, **options)
    postpone_heartbeat_process(worker)
    ended = threading.Thread(target=worker.run, daemon=True)
    ended.start()
    ended.join(60)
    is_over = not ended.is_alive()
    worker.shutdown()
    assert is_over, "it did not end"
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
