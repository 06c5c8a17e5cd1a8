"""A worker, also in Python: it starts and stops in order, and gives back what it cannot finish."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from django.core.management import CommandError, call_command
from django.db import OperationalError, connection

from django_pglock.errors import ConfigurationError
from django_pglock.models import Attempt as AttemptRow
from django_pglock.models import Task, Worker
from django_pglock.worker import Worker as WorkerUnderTest
from django_pglock.worker import worker as worker_module
from tests.conftest import NEVER, environment_at
from tests.db.worker.conftest import run_to_its_end, statuses
from tests.sample import hostile_tasks, running_tasks, tasks
from tests.sample.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)


def test_a_worker_leaves_no_trace_when_it_stops(worker):
    running = worker()
    assert Worker.objects.count() == 1
    assert running.shutdown() is True
    assert running.shutdown() is True, "twice does no harm"
    assert Worker.objects.count() == 0
    assert running.in_flight.claims == {}
    assert AttemptRow.objects.count() == 0


def test_a_shutdown_gives_back_claims_that_have_not_begun(worker, eventually):
    """With one thread and one long task, the other tasks are at most claimed. They are free again at once."""
    running = worker(threads=1, grace=60)
    for _ in range(50):
        tasks.nothing.enqueue()
    eventually(lambda: Task.objects.filter(status="SUCCESSFUL").count() == 50)
    tasks.note_and_sleep.enqueue("long", 0.5)
    for _ in range(20):
        tasks.record.enqueue("after")
    eventually(lambda: Effect.objects.filter(name="long").exists())
    assert running.shutdown() is True
    assert not Task.objects.filter(status="RUNNING").exists()
    assert Task.objects.filter(task_path__endswith="note_and_sleep", status="SUCCESSFUL").exists()


def test_a_task_longer_than_the_grace_period_is_given_back(worker, eventually, gate):
    running = worker(threads=1, grace=0.2)
    running_tasks.wait_for_note.enqueue("go on")
    eventually(lambda: Effect.objects.exists())
    assert running.shutdown() is False
    row = Task.objects.get()
    assert (row.status, row.retries, row.rescues) == ("SCHEDULED", 0, 0)
    assert row.run_after > row.last_attempted_at, "not while the process may still be at it"


def test_a_worker_that_waits_for_its_database_can_be_stopped(monkeypatch):
    monkeypatch.setattr("django_pglock.worker.service.dedicated_connection", refuse)
    worker = WorkerUnderTest(threads=1)
    thread = threading.Thread(target=worker.run)
    thread.start()
    time.sleep(0.3)
    worker.stop()
    thread.join(60)
    assert not thread.is_alive()


def test_a_worker_in_python_runs_tasks_in_children_until_nothing_is_left():
    before = [signal.getsignal(number) for number in SIGNALS]
    for _ in range(5):
        running_tasks.keep_gil.enqueue(0)
    worker = WorkerUnderTest(drain=True, threads=2, processes=2)
    files = os.listdir("/dev/fd")
    assert worker.run() is True
    assert Task.objects.filter(status="SUCCESSFUL").count() == 5
    assert os.getpid() not in Effect.objects.values_list("pid", flat=True)
    assert worker.run() is True, "it may run again"
    assert (worker.left_behind, worker.code_has_changed) == ([], False)
    assert [signal.getsignal(number) for number in SIGNALS] == before
    assert len(os.listdir("/dev/fd")) <= len(files)
    assert not Worker.objects.exists()


@pytest.mark.parametrize(("has_failed", "last"), [(False, "has ended."), (True, "has ended, and not all in order.")])
def test_the_last_line_says_that_the_worker_has_ended_also_if_it_was_idle(caplog, has_failed, last):
    caplog.set_level("INFO", "django_pglock")
    worker = WorkerUnderTest(drain=True, threads=1)
    worker._has_failed = has_failed
    assert worker.run() is not has_failed
    assert caplog.messages[-1] == f"Worker {os.getpid()} {last}"


def test_a_worker_in_python_says_what_it_has_left_behind():
    Task.objects.create(queue="default", backend="default", task_path="shop.tasks.from_the_next_deploy")
    worker = WorkerUnderTest(drain=True, threads=1)
    assert worker.run() is False
    [text] = worker.left_behind
    assert text.startswith("1 task of queue 'default' that calls 'shop.tasks.from_the_next_deploy', which this worker")


SPAWNING = """
import multiprocessing, sys
from django.core.management import execute_from_command_line
if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    execute_from_command_line(sys.argv)
"""


def test_where_a_fork_is_not_safe_children_are_new_interpreters(tmp_path):
    """A thread that a task has left, and that Python would wait for, does not keep them from ending."""
    program = tmp_path / "spawning.py"
    program.write_text(SPAWNING)
    running_tasks.keep_gil.enqueue(0)
    hostile_tasks.do.enqueue("leave_threads")
    command = [sys.executable, str(program), "runlockworker", "--drain", "--processes", "2"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, env=environment_at(), text=True, check=False, **streams)
    assert done.returncode == 0, done.stdout
    assert Task.objects.filter(status="SUCCESSFUL").count() == 2
    assert done.stdout.count("Started worker-") == 2
    assert done.stdout.count("with exit code 0") == 2


def meanwhile(act):
    """Do something in another thread as soon as a task runs, while the main thread runs a worker."""

    def wait():
        deadline = time.monotonic() + NEVER
        while time.monotonic() < deadline and not Effect.objects.exists():
            time.sleep(0.01)
        act()
        connection.close()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def send(*numbers):
    for number in numbers:
        os.kill(os.getpid(), number)
        time.sleep(0.2)


@pytest.mark.parametrize("numbers", [[signal.SIGTERM], [signal.SIGINT], [signal.SIGHUP, signal.SIGHUP]])
def test_a_signal_to_a_worker_in_python_lets_running_tasks_finish(numbers):
    """SIGHUP comes when a terminal is closed, and often twice: from the shell and from the kernel."""
    running_tasks.wait_for_note.enqueue("go on")

    def act():
        send(*numbers)
        running_tasks.note("go on")

    worker, thread = WorkerUnderTest(threads=1, grace=600), meanwhile(act)
    # ``nohup`` may have started the tests.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert worker.run() is True
    finally:
        signal.signal(signal.SIGHUP, before)
    thread.join()
    assert Task.objects.get().status == "SUCCESSFUL"


@pytest.mark.parametrize("by_signal", [False, True])
def test_a_second_stop_gives_running_tasks_back(by_signal):
    running_tasks.wait_for_note.enqueue("go on")
    worker = WorkerUnderTest(threads=1, grace=600)

    def act():
        if by_signal:
            send(signal.SIGTERM, signal.SIGTERM)
        else:
            worker.stop()
            worker.stop()

    thread = meanwhile(act)
    worker.run()
    thread.join()
    assert Task.objects.get().status == "SCHEDULED"


def test_a_stop_before_the_start_ends_the_worker():
    worker = WorkerUnderTest(threads=1)
    worker.stop()
    assert worker.run() is True


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_change_of_code_lets_running_tasks_finish(monkeypatch, worker, eventually, is_stopped):
    """A person who stops the worker meanwhile does not want it to start again."""
    dates = [1.0]
    monkeypatch.setattr(worker_module.StatReloader, "snapshot_files", lambda self: [("models.py", dates[-1])])
    monkeypatch.setattr(worker_module, "CHECK_INTERVAL", 0.01)
    running = worker(reloads=True, grace=600)
    running_tasks.wait_for_note.enqueue("go on")
    eventually(lambda: Effect.objects.exists())
    dates.append(2.0)
    eventually(lambda: running.child.is_stopping)
    if is_stopped:
        running.stop()
    time.sleep(0.1)
    running_tasks.note("go on")
    assert running.wait()
    assert running.code_has_changed is not is_stopped
    assert Task.objects.get().status == "SUCCESSFUL"


@pytest.mark.skipif(not hasattr(os, "waitid"), reason="macOS has no waitid() in Python")
def test_process_1_reaps_what_tasks_have_left_and_not_its_own_children():
    """The starter reads their exit codes."""
    script = """
import os, time
from django_pglock.worker.worker import _reap_orphans
def child(code):
    return os.fork() or os._exit(code)
orphans, ours = [child(1) for _ in range(5)], child(3)
for each in (*orphans, ours):
    os.waitid(os.P_PID, each, os.WEXITED | os.WNOWAIT)
_reap_orphans({ours})
assert os.waitstatus_to_exitcode(os.waitpid(ours, 0)[1]) == 3
_reap_orphans(set())
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    print("all reaped")
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment_at(), capture_output=True, text=True, check=False)
    assert done.stdout == "all reaped\n", done.stderr


def refuse(*args, **kwargs):
    raise OperationalError("not yet")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OperationalError("password authentication\nfailed"), "within 5 s: password authentication failed"),
        (None, "within 5 s: migrations of django_pglock are pending (0001_initial). Run: manage.py migrate django"),
    ],
)
def test_a_draining_worker_does_not_wait_for_its_database_without_end(monkeypatch, caplog, error, said):
    """Otherwise a cron job would hang."""

    def pending(using):
        if error is not None:
            raise error
        return ["0001_initial"]

    monkeypatch.setattr("django_pglock.worker.parent.heartbeat.pending_migrations", pending)
    ended = run_to_its_end(drain=True)
    assert ended.left_behind == ["what it could not read"]
    assert f"This worker ends, because it could not use the database 'default' {said}" in caplog.text


@pytest.mark.django_db(transaction=False)
@pytest.mark.parametrize("start", [lambda: WorkerUnderTest(drain=True).run(), lambda: call_command("runlockworker")])
def test_a_worker_that_would_see_no_task_of_its_test_says_so(start):
    """In a TestCase, run() would do nothing and return True."""
    tasks.nothing.enqueue()
    with pytest.raises((ConfigurationError, CommandError), match="use a TransactionTestCase"):
        start()


def test_a_child_is_replaced_as_soon_as_it_has_claimed_its_last_task(worker, eventually):
    """Long before the task has ended, so the replacement takes the next one."""
    running = worker(max_tasks=1, threads=2)
    first = running.child
    running_tasks.wait_for_note.enqueue("go on")
    eventually(lambda: running.child is not first)
    result = tasks.nothing.enqueue()
    eventually(lambda: Task.objects.get(pk=result.id).status == "SUCCESSFUL")
    assert statuses() == {"RUNNING": 1, "SUCCESSFUL": 1}
    running_tasks.note("go on")
    eventually(lambda: statuses() == {"SUCCESSFUL": 2})


@pytest.mark.parametrize("processes", [1, 2])
def test_children_with_a_limit_of_tasks_are_replaced_until_all_tasks_have_run(worker, eventually, caplog, processes):
    with caplog.at_level("INFO", logger="django_pglock"):
        running = worker(max_tasks=3, processes=processes)
        for number in range(10):
            tasks.record.enqueue("counted", number)
        eventually(lambda: statuses() == {"SUCCESSFUL": 10})
        eventually(lambda: caplog.text.count("it has run its maximum number of tasks") >= 4 - processes)
    eventually(lambda: len(running.crew.all) == processes, why="one too many is left")
    assert Effect.objects.count() == 10
    assert not running.crew.have_failed
