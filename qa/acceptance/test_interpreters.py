"""The worker with other options of the interpreter, and with children that are new interpreters."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from django_pglock.models import Task
from qa.acceptance.test_children import done, lives, ready
from tests.conftest import NEVER, ROOT, environment_at
from tests.sample import hostile_tasks, running_tasks, tasks
from tests.sample.models import Effect

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.acceptance]


@pytest.mark.parametrize(
    ("options", "environment"),
    [(["-W", "error"], {}), (["-O"], {}), (["-X", "dev", "-W", "error"], {"PYTHONDEVMODE": "1"})],
    ids=["-W error", "-O", "PYTHONDEVMODE"],
)
def test_a_worker_runs_tasks_with_options_of_the_interpreter(options, environment):
    """No warning of ours is raised, and nothing depends on an ``assert``."""
    for number in range(5):
        tasks.record_atomically.enqueue("drained", number)
        tasks.sleep_async.enqueue(0)
    running_tasks.locked.enqueue("key")
    ran = subprocess.run(
        [sys.executable, *options, str(ROOT / "manage.py"), "runlockworker", "--drain", "--processes", "2"],
        env=environment_at(**environment), capture_output=True, text=True, timeout=NEVER, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert done() == 11
    assert "Warning" not in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.fixture
def spawned(worker_process, eventually):
    """Start a worker whose children are new interpreters."""

    def start(*arguments, count=2):
        options = {"is_forked": False, "DJANGO_SETTINGS_MODULE": "tests.settings_spawn"}
        process = worker_process("--processes", str(count), "--threads", "1", *arguments, **options)
        eventually(lambda: len(ready(process)) == count, why=process.output)
        return process

    return start


def test_spawned_children_finish_their_tasks_after_ctrl_c(spawned, eventually):
    process = spawned()
    for _ in range(2):
        running_tasks.wait_for_note.enqueue("go on")
    eventually(lambda: Effect.objects.count() == 2, why=process.output)
    assert set(Effect.objects.values_list("pid", flat=True)) == ready(process)
    for pid in (process.process.pid, *ready(process)):
        os.kill(pid, signal.SIGINT)
    eventually(lambda: process.output.count("Waiting up to") == 2, why=process.output)
    Effect.objects.create(name="go on")
    assert process.wait() == 0, process.output
    assert done() == 2


def test_a_spawned_child_that_is_killed_is_replaced(spawned, eventually):
    process = spawned(count=1)
    running_tasks.wait_for_note.enqueue("go on")
    victim = eventually(lambda: Effect.objects.first()).pid
    os.kill(victim, signal.SIGKILL)
    eventually(lambda: Effect.objects.count() == 2, why=process.output)
    Effect.objects.create(name="go on")
    eventually(lambda: done() == 1, why=process.output)
    assert Task.objects.get().rescues == 1
    assert "has ended unexpectedly by SIGKILL" in process.output


@pytest.mark.parametrize("function", [tasks.note_and_sleep, running_tasks.keep_gil_from])
def test_spawned_children_die_with_their_parent(spawned, eventually, function):
    process = spawned(count=1)
    function.enqueue("dies", running_tasks.FOREVER)
    eventually(lambda: Effect.objects.exists(), why=process.output)
    [child] = ready(process)
    process.send(signal.SIGKILL)
    process.process.wait()
    eventually(lambda: not lives(child), why="it outlives its parent")


def test_a_process_that_a_task_of_a_spawned_child_leaves_does_not_hold_up_the_worker(spawned, eventually):
    process = spawned("--max-tasks", "1", count=1)
    hostile_tasks.do.enqueue("leave_a_fork")
    assert tasks.echo.enqueue("alive").wait(60).return_value == "alive"
    process.send(signal.SIGTERM)
    assert process.wait() == 0, process.output
