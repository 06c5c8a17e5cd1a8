"""A forked process inherits the sockets, claims and locks of its parent, and must use none of them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from functools import partial

import pytest

from django_pglock.models import Task, Worker
from qa.processes import sessions
from tests.conftest import NEVER, environment_at
from tests.sample import forking_tasks, tasks
from tests.sample.models import Effect

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.acceptance,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork"),
]


@pytest.fixture
def run(worker_process, eventually):
    """Run tasks in a worker, one by one. Check that they do not affect the worker, and that it ends in order."""
    process = worker_process("--threads", "2")
    tasks.record.enqueue("warm")
    eventually(lambda: Task.objects.filter(status="SUCCESSFUL").exists())
    before = eventually(partial(sessions, "lockworker heartbeat"), why="the services are not connected")
    count = 0

    def run_one(function, *args):
        nonlocal count
        count += 1
        task = int(function.enqueue(*args).id)
        eventually(lambda: Task.objects.filter(pk=task, status__in=("SUCCESSFUL", "FAILED")).exists())
        tasks.record.enqueue("afterwards")
        eventually(lambda: Effect.objects.filter(name="afterwards").count() == count, why="the worker is disturbed")
        return Task.objects.get(pk=task)

    yield run_one
    assert sessions("lockworker heartbeat") == before
    assert "lost its database connection" not in process.output
    assert not Task.objects.exclude(attempts=1).exists()
    assert set(Effect.objects.filter(name="afterwards").values_list("pid")) == {(Worker.objects.get().pid,)}
    process.send(signal.SIGTERM)
    assert process.wait() == 0


def test_a_child_of_a_task_has_sessions_of_its_own(run):
    """It uses the ORM, locks and leases, enqueues a task, and closes its connections. No other session is affected."""
    for way in forking_tasks.WAYS:
        task = run(forking_tasks.fork_a_child, way)
        assert (task.status, task.result) == ("SUCCESSFUL", 0)
    children = set(Effect.objects.filter(name="lived").values_list("pid", flat=True))
    assert len(children) == 2
    by_worker = Effect.objects.filter(name="from the child")
    assert set(by_worker.values_list("number", flat=True)) == children
    assert not by_worker.filter(pid__in=children).exists(), "a worker runs what a child enqueues, and the child is none"


def test_a_child_is_not_in_its_parents_transaction(run):
    task = run(forking_tasks.fork_in_transaction, "multiprocessing")
    assert task.status == "FAILED"
    assert "the child ended with 0" in task.failures.get().traceback
    assert Effect.objects.filter(name="lived").exists()
    assert not Effect.objects.filter(name="of the parent").exists()


def test_a_forked_child_that_returns_from_the_function_does_not_continue_as_worker(run):
    """Otherwise the child would settle the claim of its parent, and run the tasks of the inherited inbox."""
    for function in (forking_tasks.fork_and_come_back, forking_tasks.fork_in_coroutine):
        for how, code in {"return": 0, "exit": 3, "raise": 1}.items():
            task = run(function, how)
            assert (task.status, task.result) == ("SUCCESSFUL", code), (function.name, how)


def test_a_signal_to_a_child_ends_the_child(run):
    for number in (signal.SIGTERM, signal.SIGINT):
        assert run(forking_tasks.terminate_a_child, int(number)).result == -number


def test_a_child_that_outlives_its_worker_does_not_make_it_look_alive(worker_process, eventually):
    """The server sees that the worker is dead although another process has its sockets, and its port is free again."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = worker_process("--threads", "1", "--probe-port", str(port))
    forking_tasks.leave_a_child.enqueue()
    eventually(lambda: Effect.objects.filter(name="left").exists())
    child = Effect.objects.get(name="left").pid
    try:
        assert sessions("lockworker")
        process.send(signal.SIGKILL)
        process.process.wait(NEVER)
        eventually(lambda: not sessions(), why="the child keeps the sessions open")
        os.kill(child, 0)
        socket.create_server(("127.0.0.1", port)).close()
    finally:
        os.kill(child, signal.SIGKILL)


PRELOADED = """
import asyncio, os, sys, threading
import django
django.setup()
from django.db import connection
from django_pglock import Lease, LockLost, LockNotAvailable, leader, lock, try_lock
from tests.sample import forking_tasks, tasks
from tests.sample.forking_tasks import WAYS, backend_pid, live

loop = asyncio.new_event_loop()
own = lock("own").acquire()
asynchronous = loop.run_until_complete(lock("async").aacquire())
lease = Lease("leased").acquire()
leadership = leader("led").acquire()
tasks.nothing.enqueue()
mine = backend_pid()

def refused(call, error):
    try:
        call()
    except error:
        return
    raise AssertionError(f"{call} was not refused")

def child():
    for handle in (own, asynchronous, lease, leadership):
        refused(handle.assert_held, LockLost)
    assert leadership.lost.is_set() and not lease and not leadership
    refused(leadership.extend, LockLost)
    assert not try_lock("own").acquire()
    async def take():
        async with try_lock("async") as held:
            assert not held
    asyncio.run(take())
    refused(Lease("leased").acquire, LockNotAvailable)
    for handle in (own, lease, leadership):
        refused(handle.release, LockLost)
    lock("of the child").acquire().release()
    assert backend_pid() != mine

for name, way in WAYS.items():
    assert way(child) == 0, name
for handle in (own, asynchronous, lease, leadership):
    handle.assert_held()
leadership.extend()
assert backend_pid() == mine
for handle in (own, lease, leadership):
    handle.release()
loop.run_until_complete(asynchronous.release())
loop.close()
print("went well")
"""


def test_children_of_a_preloaded_process_hold_none_of_its_locks(transactional_db):
    """As under gunicorn with preload_app."""
    told = subprocess.run(
        [sys.executable, "-W", "error", "-c", PRELOADED],
        env=environment_at(),
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert (told.stdout, told.stderr, told.returncode) == ("went well\n", "", 0)
