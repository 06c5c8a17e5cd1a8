"""A redrive outlives the worker that runs it."""

from __future__ import annotations

import signal

import pytest

from django_pglock.models import Task, Worker
from django_pglock.store.bulk import change_tasks, enqueue_redrive
from tests.db.store.test_failures import fail

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.acceptance]


def test_a_redrive_whose_worker_is_killed_half_way_continues_elsewhere(worker_process, eventually):
    """No task is forgotten, and none is counted twice: the count is committed together with the retries."""
    for _ in range(20):
        fail(fingerprint=7, queue="elsewhere")
    victim = worker_process("--threads", "1", "default")
    made, _ = enqueue_redrive("default", 7, 5)
    eventually(lambda: Task.objects.filter(pk=made, progress__done__gt=0).exists(), why="it did not begin")
    victim.send(signal.SIGKILL)
    worker_process("--threads", "1", "default")
    ended = eventually(lambda: Task.objects.filter(pk=made, status="SUCCESSFUL").first(), why="it did not go on")
    assert (ended.result, ended.progress["done"], ended.progress["total"]) == (20, 20, 20)
    assert Task.objects.filter(queue="elsewhere", status="READY").count() == 20


def test_a_worker_knows_the_function_of_a_redrive_from_its_start(worker_process, eventually):
    """A busy worker checks only every half minute for functions that it does not know."""
    worker_process("default")
    [known] = eventually(lambda: list(Worker.objects.values_list("task_paths", flat=True)), why="it did not start")
    assert change_tasks.module_path in known
