"""``manage.py locktasks stack``: where a task of another process is in its code."""

from __future__ import annotations

import pytest

from django_pglock.models import Task
from qa.acceptance.management.commands.processes import locktasks
from tests.sample import running_tasks
from tests.sample.models import Effect

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.acceptance]


def test_the_stack_of_a_task_that_computes_without_a_pause(worker_process, eventually):
    """The heartbeats are so rare that only the notification can arrive in time. The task never releases the GIL."""
    worker = worker_process("--threads", "1", DJANGO_SETTINGS_MODULE="tests.settings_slow_beats")
    made = running_tasks.compute_without_pause.enqueue("4111-1111")
    eventually(lambda: Effect.objects.filter(name="begun").exists())
    code, out, err = locktasks("stack", made.id)
    assert (code, err) == (0, "")
    assert out.rstrip().endswith(("count += 1", "while count >= 0:"))
    assert "4111" not in out
    assert Task.objects.get(stack__isnull=False).pk == int(made.id)
    # After SIGTERM the worker ends late, because the task leaves little time to other threads.
    worker.process.kill()
