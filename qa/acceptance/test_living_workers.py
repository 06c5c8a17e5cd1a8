"""A living worker keeps its tasks although its heartbeat cannot be written, and a dead one loses them at any time."""

from __future__ import annotations

import os
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from django_pglock.conf import Settings
from django_pglock.models import Task, Worker
from django_pglock.postgres.sessions import dedicated_connection
from example_project.postgres import PrivatePostgres
from tests import server_clock
from tests.conftest import WorkerProcess, ask, make_tables, session_at
from tests.sample import running_tasks, tasks
from tests.sample.models import Effect
from tests.settings import DJANGO_PGLOCK

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.acceptance]

#: Longer than a worker may be silent, and a round of rescue: another one would have run the tasks again.
LONG = 2.5 * Settings(**DJANGO_PGLOCK).HEARTBEAT_LIMIT


@pytest.fixture
def person():
    """A session of a person with a transaction that stays open."""
    session = dedicated_connection("default")
    with session.cursor() as cursor:
        cursor.execute("BEGIN")
        yield cursor
    session.close()


@pytest.mark.parametrize("processes", [1, 2])
def test_tasks_run_once_although_the_row_of_their_worker_is_locked(worker_process, person, eventually, processes):
    owner = worker_process("--processes", str(processes), "--threads", "1")
    eventually(lambda: owner.output.count("is ready") == processes, why=owner.output)
    for number in range(processes):
        tasks.note_and_sleep.enqueue(str(number), LONG)
    eventually(lambda: Effect.objects.count() == processes, why=owner.output)
    locked = Worker.objects.latest("id").id
    person.execute("SELECT FROM django_pglock_worker WHERE id = %s FOR UPDATE", [locked])
    worker_process("--threads", "1", "none")

    done = Task.objects.filter(status="SUCCESSFUL")
    eventually(lambda: done.count() == processes or Task.objects.filter(rescues__gt=0).exists(), why=owner.output)
    assert list(Task.objects.values_list("attempts", "rescues")) == [(1, 0)] * processes, owner.output
    assert "another session has locked its row" in owner.output
    person.execute("ROLLBACK")
    eventually(lambda: Worker.objects.alive().filter(pk=locked).exists(), why="it does not beat again")
    for _ in range(processes):
        tasks.note_and_sleep.enqueue("again", 0.1)
    eventually(lambda: done.count() == 2 * processes, why="they do not claim again")


@contextmanager
def locked_table(server):
    with session_at(server) as session, session.transaction():
        session.execute("LOCK TABLE django_pglock_worker IN ACCESS EXCLUSIVE MODE")
        yield


@contextmanager
def no_synchronous_standby(server):
    """Each COMMIT waits."""
    with session_at(server) as session:
        session.execute("ALTER SYSTEM SET synchronous_standby_names = 'gone'")
        session.execute("SELECT pg_reload_conf()")
        yield
        session.execute("ALTER SYSTEM RESET synchronous_standby_names")
        session.execute("SELECT pg_reload_conf()")


@contextmanager
def frozen_server(server):
    [postmaster] = ask(server, "SELECT pg_read_file('postmaster.pid')")[0][0].split()[:1]
    backends = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split()
    for pid in (postmaster, *backends):
        os.kill(int(pid), signal.SIGSTOP)
    yield
    for pid in (*backends, postmaster):
        os.kill(int(pid), signal.SIGCONT)


RUNNING = """
INSERT INTO django_pglock_task (queue, backend, task_path, args)
VALUES ('default', 'default', 'tests.sample.tasks.note_and_sleep', jsonb_build_array('once', %s::float8))
"""


@pytest.mark.parametrize("fault", [locked_table, no_synchronous_standby, frozen_server])
def test_tasks_run_once_although_no_heartbeat_can_be_written(fault, eventually):
    """For longer than the hard limit. Then the parents write again, one of them first."""
    with PrivatePostgres(durable=True) as server:
        make_tables(server)
        workers = [WorkerProcess("--threads", "1", url=server.url), WorkerProcess("--threads", "1", url=server.url)]
        try:
            for each in workers:
                each.wait_for("is ready")
            ask(server, RUNNING, LONG)
            eventually(lambda: ask(server, "SELECT pid FROM sample_effect"))
            with fault(server):
                time.sleep(0.8 * LONG)
            ended = "SELECT attempts, rescues FROM django_pglock_task WHERE status = 'SUCCESSFUL'"
            assert eventually(lambda: ask(server, ended)) == [(1, 0)], [each.output for each in workers]
        finally:
            for each in workers:
                each.end()


@pytest.mark.parametrize("seconds", [300, -300], ids=["back", "forward"])
def test_a_step_of_the_clock_neither_saves_the_dead_nor_kills_the_living(worker_process, eventually, seconds):
    """A server fails over to a host whose clock is behind or ahead by five minutes, and then a host dies."""
    living, *victims = [worker_process("--threads", "1", queue) for queue in ("living", "victim", "victim")]
    running_tasks.wait_for_note.using(queue_name="living").enqueue("go on")
    [living_child] = eventually(lambda: Effect.objects.values_list("pid", flat=True)[:1])
    running_tasks.wait_for_note.using(queue_name="victim").enqueue("go on")
    eventually(lambda: Effect.objects.count() == 2, why=living.output)
    dead = Effect.objects.exclude(pid=living_child).get().pid
    server_clock.put_back(seconds)
    parents = {each.output.count(f"[{dead}]"): each for each in (living, *victims)}
    parents[1].send(signal.SIGKILL)

    eventually(lambda: Effect.objects.count() == 3, why="the task of the dead worker was not taken over")
    Effect.objects.create(name="go on")
    eventually(lambda: Task.objects.filter(status="SUCCESSFUL").count() == 2, why=living.output)
    assert set(Task.objects.values_list("queue", "attempts", "rescues")) == {("living", 1, 0), ("victim", 2, 1)}
