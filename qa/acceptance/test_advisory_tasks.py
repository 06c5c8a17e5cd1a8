"""A view and a task exclude each other by ``@task(lock=..., advisory=True)`` and ``with lock(...)``: real processes."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest
from django.db import connections

from django_pglock import lock, try_lock
from django_pglock.models import Task
from tests.conftest import NEVER
from tests.sample import advisory_tasks as tasks

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.acceptance]


def done(count):
    return lambda: Task.objects.filter(status="SUCCESSFUL").count() == count


@pytest.fixture
def path(tmp_path):
    """The file that each caller locks while it is inside. A second lock on the file shows that two are inside."""
    return str(tmp_path / "alone")


def ran_at_once(path):
    return Path(f"{path}.together").exists()


@pytest.fixture
def views(path):
    """Two threads that do as a view does, again and again; how often each was inside."""
    over, counts = threading.Event(), [0, 0]

    def view(number):
        while not over.is_set():
            with lock("shelf", 7), tasks.alone(path):
                counts[number] += 1
            over.wait(0.001)
        connections.close_all()

    threads = [threading.Thread(target=view, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    yield counts
    over.set()
    for thread in threads:
        thread.join(NEVER)
        assert not thread.is_alive()


def test_a_view_and_the_tasks_of_several_workers_are_never_together(worker_process, eventually, views, path):
    """With retries, atomic tasks, coroutines, and a worker that is killed in the middle."""
    victim, *_ = [worker_process("--threads", "4") for _ in range(2)]
    kinds = [tasks.count_shelf_atomically, tasks.count_shelf_in_coroutine]
    for number in range(36):
        if number % 3 == 2:
            tasks.count_shelf.enqueue(7, path, fails=1)
        else:
            kinds[number % 3].enqueue(7, path)
    eventually(lambda: Task.objects.filter(status="SUCCESSFUL").count() > 10)
    victim.send(signal.SIGKILL)
    before = sum(views)
    eventually(done(36), why="a task was lost, or waits forever")
    assert sum(views) > before > 0, "the views had their turns, too"
    assert not ran_at_once(path)


def test_a_frozen_worker_excludes_others_until_it_continues(worker_process, eventually, path, tmp_path):
    """Another worker claims the task after the hard limit, and waits for the session of the frozen worker."""
    go_on = tmp_path / "go on"
    frozen = worker_process("--threads", "1")
    tasks.hold_shelf.enqueue(7, path, str(go_on))
    eventually((tmp_path / "go on.inside").exists)
    frozen.send(signal.SIGSTOP)
    worker_process("--threads", "1")
    eventually(lambda: Task.objects.filter(attempts=2).exists(), why="the task was not taken over")
    with try_lock("shelf", 7, timeout=0.5) as is_held:
        assert not is_held
    go_on.touch()
    frozen.send(signal.SIGCONT)
    eventually(done(1))
    assert not ran_at_once(path)


def test_a_task_waits_for_a_view_no_longer_than_its_timeout(worker_process, eventually, path):
    with lock("shelf", 7):
        worker_process("--threads", "1")
        result = tasks.count_in_time.enqueue(7, path)
        eventually(lambda: Task.objects.filter(pk=result.id, status="FAILED").exists())
    result.refresh()
    assert [error.exception_class_path for error in result.errors] == ["django_pglock.errors.TaskTimeout"]
    assert not Path(path).exists()


def test_without_advisory_a_task_lock_key_does_not_exclude_an_advisory_lock(worker_process, eventually, tmp_path):
    """The lock key of a task excludes only other tasks."""
    worker_process("--threads", "1")
    tasks.count_without_advisory.enqueue(7, str(tmp_path / "go on"))
    eventually((tmp_path / "go on.inside").exists)
    with try_lock("shelf", 7) as is_held:
        assert is_held
    (tmp_path / "go on").touch()
    eventually(done(1))
