"""Failed tasks, retried by a person."""

from __future__ import annotations

import pytest

from django_pglock.models import Task
from django_pglock.store.outcome import Failed, Failure
from django_pglock.store.settle import settle
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)


def test_people_retry_what_failed_with_all_its_retries(claim):
    tasks.nothing.enqueue()
    [mine] = claim()
    settle("default", [(mine, Failed(Failure("builtins.ValueError", "")))], mine.worker)
    assert Task.objects.all().retry() == 1
    assert Task.objects.all().retry() == 0
    row = Task.objects.get()
    assert (row.status, row.worker, row.finished_at) == ("READY", None, None)
