"""Whatever a task does to its process, the worker continues, other tasks run, and SIGTERM ends the worker in order."""

from __future__ import annotations

import signal

import pytest

from django_pglock.models import Task, Worker
from tests.sample import hostile_tasks, tasks
from tests.sample.hostile_tasks import WAYS
from tests.sample.models import Effect

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.acceptance]


@pytest.mark.parametrize("function", [hostile_tasks.do, hostile_tasks.do_in_coroutine], ids=["sync", "async"])
@pytest.mark.parametrize("way", WAYS)
def test_a_worker_survives_what_a_task_does_to_its_process(worker_process, eventually, way, function):
    process = worker_process("--threads", "2", "--grace", "1")
    hostile = function.enqueue(way)
    eventually(lambda: Effect.objects.filter(name=way).exists(), why=process.output)
    if way.startswith(("close_all", "redirect_all")):
        # It hears nothing more. Functions that run beside this one lose their files, too.
        process.wait_for("has ended unexpectedly")
    for number in range(6):
        (tasks.record_atomically if number % 2 else tasks.record).enqueue("beside", number)
        tasks.sleep_async.enqueue(0.01)
    beside = Task.objects.exclude(pk=hostile.id)
    eventually(lambda: not beside.exclude(status="SUCCESSFUL").exists(), why=process.output)
    eventually(lambda: Task.objects.filter(pk=hostile.id, finished_at__isnull=False).exists(), why=process.output)
    assert sorted(Effect.objects.filter(name="beside", number__in=(1, 3, 5)).values_list("number", flat=True)) == [
        1, 3, 5,
    ]  # fmt: skip
    process.send(signal.SIGTERM)
    assert process.wait() == 0, process.output
    assert not Worker.objects.exists()
