"""What happens to running tasks when the supervisor that beats for their workers is killed, stopped or cut off."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter

import pytest
from django.db import connection

from django_pglock.conf import Settings
from django_pglock.models import Task
from django_pglock.models import Worker as WorkerRow
from tests.proxy import Proxy
from tests.sample import tasks
from tests.sample.models import Effect
from tests.settings import DJANGO_PGLOCK

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.acceptance]

#: Longer than a worker may be silent, and a round of rescue: another one would have run the tasks again.
LONG = 1.5 * Settings(**DJANGO_PGLOCK).HEARTBEAT_LIMIT
SHARED = "lockworker shared heartbeat"
HELD = """
SELECT count(*) FROM django_pglock_worker AS worker
JOIN pg_locks AS held ON held.objid::bigint = worker.lock_key AND held.locktype = 'advisory' AND held.objsubid = 2
JOIN pg_stat_activity AS activity ON activity.pid = held.pid WHERE activity.application_name = %s
"""


def sessions() -> Counter[str]:
    with connection.cursor() as cursor:
        cursor.execute("SELECT application_name FROM pg_stat_activity WHERE datname = current_database()")
        return Counter(name for (name,) in cursor.fetchall())


def held_by_shared() -> int:
    """Return how many of the locks that the rows of workers name are held by the shared session."""
    with connection.cursor() as cursor:
        cursor.execute(HELD, [SHARED])
        [(count,)] = cursor.fetchall()
        return int(count)


def end_session(name: str) -> int:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND application_name = %s",
            [name],
        )
        return len(cursor.fetchall())


@pytest.fixture
def supervisor(worker_process, eventually):
    """A supervisor with two processes that run long tasks, and another worker that would rescue them."""
    process = worker_process("--processes", "2", "--threads", "1")
    eventually(lambda: process.output.count("is ready") == 2, why=process.output)
    for name in "ab":
        tasks.note_and_sleep.enqueue(name, LONG)
    eventually(lambda: Effect.objects.count() == 2, why=process.output)
    worker_process("--threads", "1")
    return process


def assert_all_ran_once(eventually):
    eventually(lambda: Task.objects.filter(status="SUCCESSFUL").count() == 2, why="they did not finish")
    assert set(Task.objects.values_list("attempts", "rescues")) == {(1, 0)}


def test_a_killed_supervisor_does_not_take_the_tasks_along(supervisor, eventually):
    supervisor.send(signal.SIGKILL)
    assert_all_ran_once(eventually)


def test_while_the_supervisor_is_stopped_its_processes_beat_by_themselves(supervisor, eventually):
    supervisor.send(signal.SIGSTOP)
    eventually(lambda: held_by_shared() == 0, why="they wait for the supervisor")
    assert_all_ran_once(eventually)
    supervisor.send(signal.SIGCONT)
    eventually(lambda: held_by_shared() == 2, why="the supervisor does not beat for them again")
    assert WorkerRow.objects.count() == 3
    supervisor.send(signal.SIGTERM)
    assert supervisor.wait() == 0
    assert "lost its database connection" not in supervisor.output
    eventually(lambda: WorkerRow.objects.count() == 1)


def test_tasks_run_once_although_the_shared_session_is_cut_repeatedly(supervisor, eventually):
    ends = time.monotonic() + LONG
    cuts = 0
    while time.monotonic() < ends:
        cuts += end_session(SHARED)
        time.sleep(0.3)
    assert_all_ran_once(eventually)
    assert cuts > 3
    eventually(lambda: sessions()[SHARED] == 1, why=supervisor.output)


@pytest.fixture
def proxy(transactional_db):
    with Proxy.before(connection) as proxy:
        yield proxy


def test_tasks_run_once_while_new_connections_hang(proxy, worker_process, eventually):
    """A pooler is paused: the supervisor has its session and beats, and new ones wait for twenty seconds.

    Their threads have connections from a task before. What is about running tasks needs a session, too.
    """
    url = f"{proxy.url(connection.settings_dict['NAME'])}?connect_timeout=20"
    process = worker_process("--processes", "2", "--threads", "1", url=url)
    eventually(lambda: process.output.count("is ready") == 2, why=process.output)
    for name in "ab":
        tasks.note_and_sleep.enqueue(name, 1)
    eventually(lambda: Task.objects.filter(status="SUCCESSFUL").count() == 2, why=process.output)
    assert len(set(Effect.objects.values_list("pid", flat=True))) == 2
    # A session of an idle worker that is not needed is closed after some seconds.
    eventually(lambda: sessions()["lockworker heartbeat"] == 0, why="they beat by themselves")
    Effect.objects.all().delete()
    proxy.hold_new()
    worker_process("--threads", "1", "none")
    for name in "cd":
        tasks.note_and_sleep.enqueue(name, LONG)
    eventually(lambda: Effect.objects.count() == 2, why="they do not run, so this shows nothing")
    ended = Task.objects.filter(status="SUCCESSFUL")
    eventually(lambda: ended.count() == 4 or Task.objects.filter(rescues__gt=0).exists(), why="they did not finish")
    assert set(Task.objects.values_list("attempts", "rescues")) == {(1, 0)}
    # They end without a new session, too, and their rows go.
    process.send(signal.SIGTERM)
    assert process.wait() == 0, process.output
    assert WorkerRow.objects.count() == 1


def test_a_stopped_process_of_a_supervisor_loses_its_task_and_others_keep_theirs(supervisor, eventually):
    """The stopped process gets no heartbeat, so its task runs elsewhere. The task of the other process stays there."""
    victim, other = Effect.objects.order_by("pid")
    os.kill(victim.pid, signal.SIGSTOP)
    eventually(lambda: Effect.objects.filter(name=victim.name).count() == 2, why="its task was not rescued")
    eventually(lambda: Task.objects.filter(status="SUCCESSFUL").count() == 2, why="they did not finish")
    assert Effect.objects.filter(name=other.name).count() == 1
    assert "has been frozen" in supervisor.output
