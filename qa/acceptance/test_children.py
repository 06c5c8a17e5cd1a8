"""The children of a worker, with real signals, kills and limits. The tests check the rows."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter

import pytest
from django.db import connection

from django_pglock.models import Attempt, Task, Worker
from qa.processes import lives, parent_of
from tests.conftest import NEVER, ROOT, environment_at
from tests.sample import hostile_tasks, running_tasks, tasks
from tests.sample.models import Effect

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.acceptance]

#: Longer than a worker may be silent, and a round of rescue: another one would have run the tasks again.
LONG = 7.0
#: Ends the sessions of the parents, which beat and listen.
END_SESSION = """
SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
WHERE datname = current_database() AND application_name = 'lockworker heartbeat'
"""


def started(process) -> list[tuple[str, int]]:
    """The numbers and process ids of all that were started, in this order."""
    return [(number, int(pid)) for number, pid in re.findall(r"Started worker-(\d+)\[(\d+)\]", process.output)]


def ready(process) -> set[int]:
    return {int(pid) for pid in re.findall(r"Worker [^:\s]+:(\d+):\S+ is ready", process.output)}


def done() -> int:
    return Task.objects.filter(status="SUCCESSFUL").count()


#: How children are started: as forks, or as new interpreters.
FORKED, SPAWNED = {}, {"is_forked": False, "DJANGO_SETTINGS_MODULE": "tests.settings_spawn"}
SLOW_BEATS = {"DJANGO_SETTINGS_MODULE": "tests.settings_slow_beats"}


@pytest.fixture
def parent(worker_process, eventually):
    """Start a worker and wait until so many of its children are ready."""

    def start(*arguments, count=2, **options):
        process = worker_process("--processes", str(count), "--threads", "1", *arguments, **options)
        eventually(lambda: len(ready(process)) == count, why=process.output)
        return process

    return start


@pytest.mark.parametrize("way", [SLOW_BEATS, SPAWNED], ids=["forked", "spawned"])
def test_a_killed_child_is_replaced_and_its_task_runs_again(parent, eventually, way):
    """Its parent rescues the task at once: the heartbeats of the first worker are so rare that nobody else would."""
    process = parent(**way)
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


@pytest.mark.parametrize(
    ("number", "is_whole_group", "way"),
    [
        (signal.SIGTERM, False, FORKED),
        (signal.SIGHUP, False, FORKED),
        (signal.SIGTERM, True, FORKED),
        (signal.SIGINT, True, FORKED),
        (signal.SIGHUP, True, FORKED),
        (signal.SIGINT, True, SPAWNED),
    ],
)
def test_the_first_signal_lets_all_running_tasks_finish(parent, eventually, number, is_whole_group, way):
    """The whole group gets it by Ctrl-C in a terminal, or from systemd with KillMode=control-group. SIGHUP comes when
    a terminal is closed, and often twice: from the shell and from the kernel."""
    process = parent("--grace", "600", **way)
    for _ in range(2):
        running_tasks.wait_for_note.enqueue("go on")
    eventually(lambda: Effect.objects.count() == 2)
    tasks.record.enqueue("stays")
    children = ready(process) if is_whole_group else set()
    for pid in {process.process.pid, *children, *map(parent_of, children)}:
        os.kill(pid, number)
    eventually(lambda: process.output.count("Waiting up to") == 2, why=process.output)
    process.send(signal.SIGHUP)
    Effect.objects.create(name="go on")

    assert process.wait() == 0
    assert Counter(Task.objects.values_list("status", flat=True)) == {"SUCCESSFUL": 2, "READY": 1}
    assert not Worker.objects.exists()
    assert len(started(process)) == 2


def test_the_second_signal_to_the_parent_gives_all_running_tasks_back(parent, eventually):
    """An additional SIGTERM to each child, as from systemd, does not count as the second signal."""
    process = parent("--grace", "600")
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


@pytest.mark.parametrize("way", [FORKED, SPAWNED], ids=["forked", "spawned"])
@pytest.mark.parametrize("function", [tasks.note_and_sleep, running_tasks.keep_gil_from])
def test_children_die_with_their_parent_and_another_worker_rescues(parent, worker_process, eventually, function, way):
    """Also one that runs C code and keeps the GIL, so that it cannot see the end of its parent itself."""
    process = parent(**way)
    function.enqueue("dies", running_tasks.FOREVER)
    eventually(lambda: Effect.objects.exists())
    family = [*ready(process), parent_of(min(ready(process)))]
    process.send(signal.SIGKILL)

    process.process.wait()
    eventually(lambda: not any(map(lives, family)), why="a process outlives its parent")
    other = worker_process("--threads", "1")
    eventually(lambda: Effect.objects.count() == 2, why=other.output)
    assert Task.objects.get().rescues == 1


def test_a_worker_whose_starter_was_killed_ends_and_its_tasks_are_rescued(parent, eventually):
    """Its exit code calls the service manager. The parent itself takes the tasks back before it ends."""
    process = parent(**SLOW_BEATS)
    tasks.note_and_sleep.enqueue("cut short", running_tasks.FOREVER)
    eventually(lambda: Effect.objects.exists())
    children = ready(process)
    os.kill(parent_of(min(children)), signal.SIGKILL)
    assert process.wait() == 1
    assert not any(map(lives, children))
    assert list(Task.objects.values_list("status", "rescues")) == [("READY", 1)], process.output
    assert not Worker.objects.exists()


def test_a_stopped_child_loses_its_task_and_is_replaced_and_others_keep_theirs(parent, eventually):
    process = parent()
    for name in "ab":
        tasks.note_and_sleep.enqueue(name, LONG)
    eventually(lambda: Effect.objects.count() == 2, why=process.output)
    victim, other = Effect.objects.order_by("pid")
    os.kill(victim.pid, signal.SIGSTOP)
    eventually(lambda: Effect.objects.filter(name=victim.name).count() == 2, why="its task was not rescued")
    eventually(lambda: done() == 2, why="they did not finish")
    assert Effect.objects.filter(name=other.name).count() == 1
    assert "has been frozen" in process.output
    assert not lives(victim.pid)


def test_children_of_a_stopped_parent_claim_nothing_and_their_outcomes_have_no_effect(
    parent, worker_process, eventually
):
    """Nobody beats for them, so others rescue their tasks. When the parent continues, so do they."""
    process = parent(count=1)
    running_tasks.write_and_wait_for_note.enqueue("once", "go on")
    eventually(lambda: Task.objects.filter(status="RUNNING").exists())
    process.send(signal.SIGSTOP)
    other = worker_process("--threads", "1")
    eventually(lambda: Task.objects.filter(attempts=2).exists(), why="the task was not taken over")
    Effect.objects.create(name="go on")
    eventually(lambda: done() == 1)
    process.wait_for("was lost")
    other.send(signal.SIGTERM)
    assert other.wait() == 0
    later = tasks.echo.enqueue("later")
    time.sleep(3)
    assert Task.objects.get(pk=later.id).status == "READY", "it claims although nobody hears of it"
    process.send(signal.SIGCONT)
    assert later.wait(60).return_value == "later"
    assert Effect.objects.filter(name="once").count() == 1


def test_a_task_that_keeps_the_gil_runs_once(worker_process, eventually):
    """For longer than the limit after which a worker counts as dead in any case, with another one ready to rescue."""
    busy = worker_process("--threads", "1")
    running_tasks.keep_gil.enqueue(LONG)
    eventually(lambda: Effect.objects.exists(), why="the task did not begin")
    worker_process("--threads", "1")

    eventually(lambda: Task.objects.filter(status="SUCCESSFUL").exists(), why=busy.output)
    task = Task.objects.get()
    assert (task.attempts, task.rescues, task.result) == (1, 0, "once")
    assert (task.finished_at - task.started_at).total_seconds() > LONG - 1


def test_tasks_run_once_although_the_session_of_their_parent_is_cut_repeatedly(parent, worker_process, eventually):
    process = parent()
    for name in "ab":
        tasks.note_and_sleep.enqueue(name, LONG)
    eventually(lambda: Effect.objects.count() == 2, why=process.output)
    worker_process("--threads", "1")
    ends, cuts = time.monotonic() + LONG, 0
    with connection.cursor() as cursor:
        while time.monotonic() < ends:
            cursor.execute(END_SESSION)
            cuts += cursor.fetchone()[0]
            time.sleep(0.3)
    eventually(lambda: done() == 2, why="they did not finish")
    assert set(Task.objects.values_list("attempts", "rescues")) == {(1, 0)}
    assert cuts > 3


def test_each_child_ends_after_max_tasks(worker_process, eventually):
    """The next begins while the last ends."""
    process = worker_process("--max-tasks", "5", "--threads", "2")
    for number in range(12):
        tasks.record.enqueue("counted", number)
    eventually(lambda: done() == 12, why=process.output)
    ran = Counter(Effect.objects.values_list("pid", flat=True))
    assert sorted(ran.values()) == [2, 5, 5]
    process.send(signal.SIGTERM)
    assert process.wait() == 0
    assert "unexpectedly" not in process.output
    assert process.process.pid not in ran, "the parent runs nothing itself"


def test_a_child_that_has_grown_is_replaced(worker_process, eventually):
    process = worker_process("--max-memory", "200", "--threads", "1")
    first = tasks.hoard.enqueue(200)
    eventually(lambda: len(ready(process)) == 2, why=process.output)
    second = tasks.hoard.enqueue(1)
    eventually(lambda: done() == 2, why=process.output)
    first.refresh(), second.refresh()
    assert [first.return_value, second.return_value] == [pid for _, pid in started(process)]
    assert "MiB of memory" in process.output


def test_a_child_with_tasks_that_do_not_end_is_replaced(worker_process, eventually):
    """Neither a sleep in C nor a loop runs a statement. The other task may end first. Then both are retried."""
    process = worker_process("--threads", "3", "--grace", "15")
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


def test_a_child_whose_task_keeps_the_gil_after_its_timeout_is_killed(worker_process, eventually):
    """No thread of the child can do anything, so its parent ends the attempt. The neighbour runs again."""
    process = worker_process("--threads", "2", "--grace", "0")
    neighbour = running_tasks.wait_for_note.enqueue("go on")
    eventually(lambda: Effect.objects.exists())
    overrun = running_tasks.keep_gil.using(timeout=0.3).enqueue(running_tasks.FOREVER)
    eventually(lambda: Task.objects.filter(pk=overrun.id, status="FAILED").exists(), why=process.output)
    assert Attempt.objects.get(task=overrun.id).exception_path == "django_pglock.errors.TaskTimeout"
    Effect.objects.create(name="go on")
    eventually(lambda: done() == 1, why=process.output)
    row = Task.objects.get(pk=neighbour.id)
    assert (row.retries, row.rescues) == (0, 1)
    assert "does not react. It is killed." in process.output


def test_a_child_calls_its_own_exit_functions_and_not_those_of_its_parent(parent):
    """Those of the parent delete what its other children use: a temporary folder that a module has made, for example.

    What Sentry, OpenTelemetry and log handlers have collected is sent without them.
    """
    process = parent("--max-tasks", "1", count=1, DJANGO_SETTINGS_MODULE="tests.settings_exit_functions")
    child = hostile_tasks.do_at_exit.enqueue().wait(60).return_value
    process.wait_for(f"The task ends in {child}.")
    process.send(signal.SIGTERM)
    assert process.wait() == 0
    assert re.findall(r"The project ends in (\d+)", process.output) == [str(process.process.pid)]


def test_a_process_that_a_task_of_a_spawned_child_leaves_does_not_hold_up_the_worker(parent):
    process = parent("--max-tasks", "1", count=1, **SPAWNED)
    hostile_tasks.do.enqueue("leave_a_fork")
    assert tasks.echo.enqueue("alive").wait(60).return_value == "alive"
    process.send(signal.SIGTERM)
    assert process.wait() == 0, process.output


@pytest.mark.parametrize(
    ("options", "environment"),
    [(["-W", "error"], {}), (["-O"], {}), (["-X", "dev", "-W", "error"], {"PYTHONDEVMODE": "1"})],
    ids=["-W error", "-O", "PYTHONDEVMODE"],
)
def test_a_worker_drains_with_options_of_the_interpreter(options, environment):
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
    assert ran.stderr.count("Started worker-") == 2
    assert "Warning" not in ran.stderr
    assert "Traceback" not in ran.stderr


#: A program without a file. It has to start its children by a command line if they are new interpreters.
PROGRAM = """
import multiprocessing, sys
if "spawn" in sys.argv: multiprocessing.set_start_method("spawn")
import django
from django.core.management import CommandError, call_command
django.setup()
try:
    call_command("runlockworker", drain=True)
except CommandError as error:
    print(error, file=sys.stderr)
    sys.exit(error.returncode)
"""


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["-c", PROGRAM], 0), (["-"], 0), (["-c", PROGRAM, "spawn"], 0), (["-", "spawn"], 2)],
    ids=["code", "input", "spawned code", "spawned input"],
)
def test_a_program_without_a_file_starts_children_if_they_are_forks_or_its_code_is_an_argument(arguments, code):
    tasks.nothing.enqueue()
    ran = subprocess.run(
        [sys.executable, *arguments],
        env=environment_at(), input=PROGRAM, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ran.returncode == code, ran.stderr
    assert done() == (code == 0)
    if code:
        assert "Python has read it from its standard input. Run: manage.py" in ran.stderr
