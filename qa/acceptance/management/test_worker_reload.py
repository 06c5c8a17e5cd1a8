"""Autoreload in development: the running task ends before the process does."""

from __future__ import annotations

import os
import signal

import pytest

from django_pglock.models import Task
from tests.sample import tasks
from tests.sample.models import Effect

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.acceptance]

WATCHED = """
from tests.settings import *
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_changed_file_restarts_the_worker_after_its_task(worker_process, eventually, tmp_path, number):
    """Other task queues lose the task: its row stays RUNNING forever."""
    settings = tmp_path / "watched_settings.py"
    settings.write_text(WATCHED)
    process = worker_process(
        "--reload", "--threads", "1", DJANGO_SETTINGS_MODULE="watched_settings", PYTHONPATH=str(tmp_path)
    )
    tasks.note_and_sleep.enqueue("first", 2)
    eventually(lambda: Effect.objects.exists())

    def change_and_look():
        # Repeated: the reloader checks once a second and ignores changes before its first check.
        os.utime(settings)
        return process.output.count("is ready") >= 2

    eventually(change_and_look, why=process.output)
    task = Task.objects.get()
    assert (task.status, task.attempts) == ("SUCCESSFUL", 1)

    tasks.note_and_sleep.enqueue("second", 1)
    eventually(lambda: Effect.objects.count() == 2)
    process.send(number)
    assert process.wait() == 0
    eventually(lambda: not Task.objects.exclude(status="SUCCESSFUL").exists(), why=process.output)
