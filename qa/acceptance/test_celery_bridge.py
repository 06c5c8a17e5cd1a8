"""Tasks with Celery's names, whose processes are killed: in Celery, the rest of a chain and the errbacks are lost."""

from __future__ import annotations

import pytest

from django_pglock.models import Task
from tests.conftest import NEVER
from tests.sample import celery_tasks as tasks
from tests.sample.models import Effect

pytestmark = [pytest.mark.acceptance, pytest.mark.django_db(transaction=True)]


def test_a_chain_goes_on_after_the_death_of_a_process_and_no_retry_is_spent(worker_process):
    result = (tasks.add.s(1, 2) | tasks.dies_once.s() | tasks.add.s(10)).delay()
    worker_process("--threads", "2")
    assert result.get(NEVER) == 14
    assert [*Effect.objects.filter(name="begins").values_list("number", flat=True)] == [0, 0]


def test_the_errback_of_a_task_that_kills_each_process_is_called(worker_process, eventually):
    result = tasks.dies.apply_async(link_error=tasks.note_failure.s())
    worker_process("--threads", "2")
    eventually(lambda: Effect.objects.filter(name=result.id).exists(), why="the errback is not called")
    assert result.state == "FAILURE"
    assert Task.objects.get(task_path__endswith=".dies").rescues > 1
