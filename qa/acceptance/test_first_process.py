"""The worker as process 1 of a container: it gets the signals, and reaps what tasks leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from django_pglock.models import Task, Worker
from tests.conftest import NEVER, ROOT, environment_at
from tests.sample import hostile_tasks, tasks
from tests.sample.models import Effect

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.acceptance]

#: Only root may make a container without a mapping of users, and only without one may root use the socket of another.
MAPPING = ["--user", "--map-root-user"] if os.geteuid() else []
CONTAINER = ["unshare", *MAPPING, "--pid", "--fork", "--mount-proc"]
COMMAND = [sys.executable, str(ROOT / "manage.py"), "runlockworker", "--threads", "2"]


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def sleeps_of(pid: int) -> list[int]:
    """Return the programs that a task has started, also those that have ended and are not reaped."""
    return [child for child in children_of(pid) if "(sleep)" in Path(f"/proc/{child}/stat").read_text()]


@pytest.fixture
def first_process(transactional_db, eventually):
    """Start a worker as process 1, and return its process here and its number outside of the container."""
    with subprocess.Popen([*CONTAINER, *COMMAND], env=environment_at(), stderr=subprocess.PIPE, text=True) as process:
        try:
            eventually(lambda: Worker.objects.exists() or process.poll() is not None)
            assert process.poll() is None, process.stderr.read()
            yield process, children_of(process.pid)[0]
        finally:
            process.kill()


def test_the_first_process_reaps_what_tasks_leave_and_ends_in_order(first_process, eventually):
    process, first = first_process
    hostile_tasks.leave_orphans.enqueue(2)
    eventually(lambda: len(sleeps_of(first)) == 2, why="they are no orphans, so this shows nothing")
    eventually(lambda: not sleeps_of(first), why="they are not reaped")
    tasks.note_and_sleep.enqueue("finishes", 1)
    eventually(lambda: Effect.objects.filter(name="finishes").exists())
    os.kill(first, signal.SIGTERM)
    process.communicate(timeout=NEVER)
    assert process.returncode == 0
    assert set(Task.objects.values_list("status", flat=True)) == {"SUCCESSFUL"}
    assert not Worker.objects.exists()
