"""Several worker processes under a supervisor, with real kills and real limits. The tests check the rows."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress

import pytest

from django_pglock.models import Attempt, Task, Worker
from tests.conftest import NEVER, environment_at
from tests.sample import running_tasks, tasks
from tests.sample.models import Effect

PROGRAM = """
import sys
import django
from django.core.management import CommandError, call_command

django.setup()
try:
    call_command("runlockworker", max_memory=100_000, drain=True)
except CommandError as error:
    print(error, file=sys.stderr)
    sys.exit(error.returncode)
"""

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.acceptance]


def started(process) -> list[tuple[str, int]]:
    """The numbers and process ids of all that were started, in this order."""
    return [(number, int(pid)) for number, pid in re.findall(r"Started worker-(\d+)\[(\d+)\]", process.output)]


def ready(process) -> set[int]:
    return {int(pid) for pid in re.findall(r"worker-\d+\[(\d+)\] Worker \S+ is ready", process.output)}


def done() -> int:
    return Task.objects.filter(status="SUCCESSFUL").count()


@pytest.fixture
def supervisor(worker_process, eventually):
    """Start a supervisor and wait until so many of its workers are ready."""

    def start(*arguments, count=2, **options):
        process = worker_process("--processes", str(count), "--threads", "1", *arguments, **options)
        eventually(lambda: len(ready(process)) == count, why=process.output)
        return process

    return start


@pytest.mark.parametrize(
    ("is_code", "code", "text"),
    [(True, 0, "has ended with exit code 0"), (False, 2, "Python has read it from its standard input. Run: manage.py")],
)
def test_a_program_without_a_file_starts_processes_if_its_code_is_an_argument(is_code, code, text):
    tasks.nothing.enqueue()
    ran = subprocess.run(
        [sys.executable, *(["-c", PROGRAM] if is_code else ["-"])],
        env=environment_at(), input=PROGRAM, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ran.returncode == code, ran.stderr
    assert text in ran.stderr
    assert done() == is_code


def test_a_killed_process_is_replaced_and_its_task_runs_again(supervisor, eventually):
    process = supervisor()
    running_tasks.wait_for_note.enqueue("go on")
    victim = eventually(lambda: Effect.objects.first()).pid
    survivor = (ready(process) - {victim}).pop()
    os.kill(victim, signal.SIGKILL)

    eventually(lambda: Effect.objects.count() == 2, why=process.output)
    Effect.objects.create(name="go on")
    eventually(lambda: done() == 1, why=process.output)
    assert Task.objects.get().rescues == 1
    eventually(lambda: len(ready(process)) == 3, why=process.output)
    numbers = {pid: number for number, pid in started(process)}
    assert sorted(numbers.values()) == sorted(["1", "2", numbers[victim]])
    assert f"worker-{numbers[victim]}[{victim}] has ended unexpectedly by SIGKILL" in process.output
    os.kill(survivor, 0)
    process.send(signal.SIGTERM)
    assert process.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_first_signal_to_a_supervisor_lets_all_running_tasks_finish(supervisor, eventually, number):
    process = supervisor("--grace", "600")
    for _ in range(2):
        running_tasks.wait_for_note.enqueue("go on")
    eventually(lambda: Effect.objects.count() == 2)
    tasks.record.enqueue("stays")
    process.send(number)
    eventually(lambda: process.output.count("Waiting up to") == 2, why=process.output)
    process.send(signal.SIGHUP)
    Effect.objects.create(name="go on")

    assert process.wait() == 0
    assert Counter(Task.objects.values_list("status", flat=True)) == {"SUCCESSFUL": 2, "READY": 1}
    assert not Worker.objects.exists()
    assert len(started(process)) == 2


def test_the_second_signal_to_a_supervisor_gives_all_running_tasks_back(supervisor, eventually):
    """An additional SIGTERM to each process, as from systemd, does not count as the second signal."""
    process = supervisor("--grace", "600")
    for name in "ab":
        tasks.note_and_sleep.enqueue(name, running_tasks.FOREVER)
    eventually(lambda: Effect.objects.count() == 2)
    process.send(signal.SIGTERM)
    eventually(lambda: process.output.count("Waiting up to") == 2, why=process.output)
    for pid in ready(process):
        os.kill(pid, signal.SIGTERM)
    time.sleep(0.3)
    assert process.process.poll() is None
    assert Task.objects.filter(status="RUNNING").count() == 2
    process.send(signal.SIGTERM)

    assert process.wait() == 0
    assert list(Task.objects.values_list("status", "rescues")) == [("SCHEDULED", 0)] * 2


def test_a_killed_supervisor_leaves_no_process_behind(supervisor, eventually):
    """The processes notice it by their channel, and drain. All of them are new interpreters here, as for users."""
    process = supervisor(is_forked=False)
    tasks.note_and_sleep.enqueue("finishes", 1)
    eventually(lambda: Effect.objects.exists())
    process.send(signal.SIGKILL)

    process.process.wait(NEVER)
    # A process that still lives holds the other end of this pipe.
    process._reader.join(NEVER)
    if process._reader.is_alive():
        for pid in ready(process):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        pytest.fail(process.output)
    assert process.output.count("The supervisor of this worker has ended") == 2
    assert done() == 1
    assert not Worker.objects.exists()


def test_each_process_of_a_supervisor_ends_after_max_tasks(worker_process, eventually):
    """One process at a time, for which the option implies a supervisor; the next begins while the last ends."""
    process = worker_process("--max-tasks", "5", "--threads", "2")
    for number in range(12):
        tasks.record.enqueue("counted", number)
    eventually(lambda: done() == 12, why=process.output)
    ran = Counter(Effect.objects.values_list("pid", flat=True))
    assert sorted(ran.values()) == [2, 5, 5]
    process.send(signal.SIGTERM)
    assert process.wait() == 0
    assert "unexpectedly" not in process.output
    assert process.process.pid not in ran, "the supervisor runs nothing itself"


def test_a_process_that_has_grown_is_replaced(worker_process, eventually):
    process = worker_process("--max-memory", "200", "--threads", "1")
    first = tasks.hoard.enqueue(200)
    eventually(lambda: len(ready(process)) == 2, why=process.output)
    second = tasks.hoard.enqueue(1)
    eventually(lambda: done() == 2, why=process.output)
    first.refresh(), second.refresh()
    assert [first.return_value, second.return_value] == [pid for _, pid in started(process)]
    assert "MiB of memory" in process.output


def test_processes_that_drain_end_together(supervisor, eventually, worker_process):
    for number in range(50):
        tasks.record.enqueue("drained", number)
    process = worker_process("--processes", "2", "--drain")
    assert process.wait() == 0
    assert done() == 50
    assert len(started(process)) == 2


def test_a_process_with_tasks_that_do_not_end_is_replaced(worker_process, eventually):
    """Neither a sleep in C nor a loop runs a statement. The other task may end first. Then both are retried."""
    process = worker_process("--max-memory", "100000", "--threads", "3", "--grace", "15")
    neighbour = running_tasks.wait_for_note.enqueue("go on")
    overrun = [running_tasks.overrun_once.enqueue(kind) for kind in ("sleep", "compute")]
    eventually(lambda: "The process is replaced." in process.output, why=process.output)
    Effect.objects.create(name="go on")
    eventually(lambda: done() == 3, why=process.output)

    [(_, first), (_, second)] = started(process)
    for result in overrun:
        assert result.wait(1).return_value == second
        row = Task.objects.get(pk=result.id)
        assert (row.attempts, row.retries, row.rescues) == (2, 1, 0)
        assert Attempt.objects.get(task=row).exception_path == "django_pglock.errors.TaskTimeout"
        assert Task.objects.get(pk=neighbour.id).finished_at < row.last_attempted_at, "it was tried again too early"
    assert Task.objects.get(pk=neighbour.id).attempts == 1
    eventually(lambda: f"worker-1[{first}] has ended with exit code 0" in process.output, why=process.output)
