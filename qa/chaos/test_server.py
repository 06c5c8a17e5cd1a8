"""Faults of the server: sessions that end, restarts, an outage, a full disk, locks, rights, a clock that steps."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import time
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from django.db import OperationalError, connection

from django_pglock.models import Attempt, Task
from django_pglock.store.rescue import LOST_WITH_WORKER
from django_pglock.tasks import enqueue_many
from example_project.postgres import PrivatePostgres, account
from qa.chaos.experiment import ENVIRONMENT
from qa.soak.faults import TERMINATE
from tests.conftest import make_tables, session_at
from tests.sample import chaos_tasks
from tests.sample.tasks import nothing

#: Seconds within which work continues, and within which each worker takes part in it.
GOES_ON, ALL_GO_ON = 5.0, 10.0
#: Heartbeats for the short form, where the fault has to last longer than the limit.
QUICK = {"HEARTBEAT_INTERVAL": 0.8}


@pytest.fixture(scope="module")
def own_server():
    with PrivatePostgres(durable=True, settings={"max_connections": "40"}) as server:
        make_tables(server, **ENVIRONMENT)
        yield server


@pytest.fixture
def server(own_server):
    """A server to which faults are applied. It runs when a test begins, also after a fault of the test before."""
    with contextlib.suppress(psycopg.OperationalError), closing(session_at(own_server)):
        return own_server
    own_server.restart("immediate")
    return own_server


@pytest.fixture
def show_that_work_continues(experiment, keep_busy, eventually):
    """Show that all work is done, and how soon each worker worked again after each of some moments, or from now on."""

    def show(workers, *moments):
        if not moments:
            moments = (time.time(),)
            keep_busy(workers, *moments)
        eventually(experiment.is_over, why="some task is stuck")
        evidence = experiment.judge()
        begins = [[evidence.begins(worker.id, moment) for worker in workers] for moment in moments]
        experiment.show("work continues", max(map(min, begins)), GOES_ON)
        experiment.show("every worker works again", max(map(max, begins)), ALL_GO_ON)

    return show


@pytest.fixture
def keep_busy(experiment, eventually):
    """Enqueue a little until each of the workers has begun something after a moment."""
    return lambda workers, since: eventually(
        experiment.all_begin(workers, since), why="some worker does not work again"
    )


def ask(statement):
    with connection.cursor() as cursor:
        cursor.execute(statement)
        return cursor.fetchone()[0] if cursor.description else None


@pytest.mark.short
@pytest.mark.fault("storm of pg_terminate_backend")
def test_every_session_is_terminated_again_and_again(experiment, show_that_work_continues, eventually, is_short):
    workers = experiment.workers(2, "--threads", "2")
    experiment.load(5)
    eventually(experiment.running, why="the work did not begin")
    terminated, end = 0, time.monotonic() + (4 if is_short else 30)
    while time.monotonic() < end or terminated <= 20:
        experiment.load(1)
        terminated += ask(TERMINATE)
        time.sleep(0.25)
    show_that_work_continues(workers)


@pytest.mark.fault("SIGKILL of a worker while every session is terminated")
def test_a_worker_dies_while_all_are_cut(experiment, hit, recovery_after):
    """All workers are silent for a moment. The living workers beat again, so the silent one counts as dead."""
    victim, *_others = experiment.workers(3, "--threads", "2")
    fault = hit(victim)
    ask(TERMINATE)
    experiment.show("its tasks run elsewhere", recovery_after(fault).last, bound=10)
    rescued = Attempt.objects.filter(exception_path=LOST_WITH_WORKER)
    assert set(rescued.values_list("worker", flat=True)) == {victim.id}, "a living worker was taken for dead"


@pytest.mark.short
@pytest.mark.fault("immediate restart of PostgreSQL")
def test_an_immediate_restart(experiment, keep_busy, show_that_work_continues, eventually, is_short):
    workers = experiment.workers(2, "--threads", "2")
    moments = []
    for _ in range(1 if is_short else 5):
        experiment.load(20, seconds=0.1)
        eventually(lambda: Task.objects.filter(status="RUNNING").exists(), why="the work did not begin")
        experiment.server.restart("immediate")
        connection.close()
        moments.append(time.time())
        keep_busy(workers, moments[-1])
        eventually(experiment.is_over, why="some task is stuck")
    show_that_work_continues(workers, *moments)


@pytest.mark.short
@pytest.mark.fault("outage of PostgreSQL")
def test_an_outage(experiment, show_that_work_continues, eventually, is_short):
    """Longer than two beats, in the long form as long as the hard limit; functions continue to run meanwhile."""
    seconds, beats = (4, QUICK) if is_short else (30, {})
    workers = experiment.workers(2, pglock=beats)
    long = experiment.expect(*[chaos_tasks.work.enqueue(seconds + 4) for _ in range(3)])
    eventually(lambda: experiment.running(3), why="the work did not begin")
    experiment.load(10)
    experiment.server.halt()
    connection.close()
    time.sleep(seconds)
    experiment.server.launch()
    show_that_work_continues(workers)
    experiment.affirm("no living worker is taken for dead", is_kept=not lost_of(long))


def lost_of(tasks):
    return Attempt.objects.filter(task__in=tasks, outcome="LOST").count()


@pytest.mark.short
@pytest.mark.fault("all of max_connections taken")
def test_all_connections_are_taken(experiment, show_that_work_continues, eventually, is_short):
    old = experiment.worker("--threads", "2")
    experiment.load(20)
    eventually(experiment.running, why="the work did not begin")
    with contextlib.ExitStack() as clients:
        while sessions_of_workers():
            ask(TERMINATE_WORKERS)
            take_all(experiment.server, clients)
        new = experiment.start("--threads", "2")
        old.wait_for("has lost its database connection and tries again")
        new.wait_for("cannot reach the database and tries again")
        time.sleep(1 if is_short else 20)
        assert "is ready" not in new.output
    since = time.time()
    experiment.wait_until_ready(new)
    experiment.show("a worker that waited for its start is ready", time.time() - since, ALL_GO_ON)
    show_that_work_continues([old, new])


TERMINATE_WORKERS = TERMINATE + " AND application_name <> 'other client'"


def sessions_of_workers():
    return ask(f"SELECT count(*) FROM ({TERMINATE_WORKERS.replace('count(pg_terminate_backend(pid))', 'pid')}) AS pids")


def take_all(server, clients):
    with contextlib.suppress(psycopg.OperationalError):
        while True:
            clients.enter_context(closing(session_at(server, application_name="other client")))


REFUSE = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'no space' USING ERRCODE = '53100'; END $$;
CREATE TRIGGER refuse BEFORE UPDATE ON django_pglock_task FOR EACH ROW WHEN (NEW.status = 'SUCCESSFUL')
EXECUTE FUNCTION refuse()
"""


@pytest.mark.short
@pytest.mark.fault("no space left for the outcomes of tasks")
def test_the_table_refuses_outcomes(experiment, show_that_work_continues, eventually, is_short):
    """Their functions have returned, so none of them fails."""
    workers = experiment.workers(2, "--threads", "2")
    experiment.load(40)
    eventually(lambda: experiment.running(2), why="the work did not begin")
    ask(REFUSE)
    try:
        time.sleep(4 if is_short else 30)
    finally:
        ask("DROP FUNCTION refuse() CASCADE")
    show_that_work_continues(workers)
    experiment.affirm("no task fails", is_kept=not Task.objects.filter(status="FAILED").exists())


@pytest.mark.short
@pytest.mark.fault("ACCESS EXCLUSIVE on the tasks for longer than the hard limit")
def test_the_table_is_locked_for_long(experiment, show_that_work_continues, eventually, is_short):
    """While functions run. A worker that waits for a table lock is alive."""
    seconds, beats = (10, QUICK) if is_short else (40, {})
    workers = experiment.workers(2, pglock=beats)
    long = experiment.expect(*[chaos_tasks.work.enqueue(seconds + 4) for _ in range(3)])
    eventually(lambda: experiment.running(3), why="the work did not begin")
    experiment.load(10)
    with closing(session_at(experiment.server)) as dba, dba.transaction():
        dba.execute("LOCK TABLE django_pglock_task IN ACCESS EXCLUSIVE MODE")
        time.sleep(seconds)
    show_that_work_continues(workers)
    experiment.affirm("no living worker is taken for dead", is_kept=not lost_of(long))


@contextlib.contextmanager
def role(server, **settings):
    """Make a role that may use all tables, with settings of its own, and yield a URL for it."""
    ask("CREATE ROLE app LOGIN")
    try:
        for name, value in settings.items():
            ask(f"ALTER ROLE app SET {name} = '{value}'")
        ask("GRANT ALL ON ALL TABLES IN SCHEMA public TO app; GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO app")
        yield server.url.replace("postgres@", "app@", 1)
    finally:
        ask("DROP OWNED BY app; DROP ROLE app")


def enqueue_with_one_attempt(experiment):
    once = [each.using(max_attempts=1) for each in (chaos_tasks.work, chaos_tasks.work_atomically)]
    experiment.expect(*[each.enqueue(0.5) for _ in range(24) for each in once])


@pytest.mark.short
@pytest.mark.fault("lock_timeout of 200 ms on the role, ACCESS EXCLUSIVE on the tasks for 5 s")
def test_the_role_gives_up_locks_soon(experiment, show_that_work_continues, eventually):
    """What the server refuses to the queue is no failure of a task."""
    with role(experiment.server, lock_timeout="200ms") as url:
        workers = experiment.workers(2, "--threads", "4", url=url)
        enqueue_with_one_attempt(experiment)
        eventually(lambda: experiment.running(4), why="the work did not begin")
        with closing(session_at(experiment.server)) as dba, dba.transaction():
            dba.execute("LOCK TABLE django_pglock_task IN ACCESS EXCLUSIVE MODE")
            time.sleep(5)
        show_that_work_continues(workers)
        end_all(workers)


@pytest.mark.short
@pytest.mark.fault("REVOKE of all rights on the tasks for 10 s")
def test_the_rights_are_revoked(experiment, show_that_work_continues, eventually, is_short):
    """As by a deploy that sets rights anew, while functions return."""
    with role(experiment.server) as url:
        workers = experiment.workers(2, "--threads", "4", url=url)
        enqueue_with_one_attempt(experiment)
        eventually(lambda: experiment.running(4), why="the work did not begin")
        ask("REVOKE ALL ON django_pglock_task FROM app")
        time.sleep(4 if is_short else 10)
        ask("GRANT ALL ON django_pglock_task TO app")
        show_that_work_continues(workers)
        end_all(workers)


def end_all(workers):
    """End workers before their role is dropped."""
    for worker in workers:
        worker.end()


@pytest.mark.fault("a transaction that holds xmin back")
def test_an_old_snapshot(experiment, eventually):
    """No dead row can be removed while it lasts. A claim of few tasks must not read all of them each time."""
    count = 60_000
    experiment.worker("default", CHAOS_CLAIM="16")
    with closing(session_at(experiment.server)) as reader:
        reader.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        reader.execute("SELECT count(*) FROM django_pglock_task")
        enqueue_many(nothing, range(count))
        experiment.load(20, seconds=0)
        eventually(lambda: time.sleep(0.5) or experiment.is_over(), why="some task is stuck")
    done = Task.objects.filter(task_path="tests.sample.tasks.nothing", status="SUCCESSFUL")
    times = sorted(done.values_list("finished_at", flat=True))
    assert len(times) == count
    done.delete()
    experiment.judge()
    # The first claims find cold caches.
    part = count // 20
    early, late = ((times[end - 1] - times[end - part]).total_seconds() for end in (2 * part, count))
    experiment.show(f"the last {part} of {count} tasks take as long as the second {part}, or thrice", late, 3 * early)


@pytest.mark.short
@pytest.mark.fault("disk full")
def test_no_space_is_left(experiment, small_disk, show_that_work_continues, eventually, is_short):
    """For tables and indexes, not for the WAL: without space for the WAL no server runs, which is an outage."""
    with tables_on(small_disk):
        workers = experiment.workers(2, "--threads", "2")
        experiment.load(100, seconds=0.01)
        eventually(experiment.running, why="the work did not begin")
        filler = small_disk / "filler"
        fill(filler)
        with pytest.raises(OperationalError, match="No space left on device"):
            while True:
                experiment.load(20, seconds=0.01)
        eventually(
            lambda: any("No space left on device" in worker.output for worker in workers), why="no worker met it"
        )
        time.sleep(1 if is_short else 20)
        filler.unlink()
        show_that_work_continues(workers)


@contextlib.contextmanager
def tables_on(folder):
    """Keep all tables and indexes in a folder for the time of a block."""
    move = "ALTER TABLE ALL IN TABLESPACE {0} SET TABLESPACE {1}; ALTER INDEX ALL IN TABLESPACE {0} SET TABLESPACE {1}"
    ask(f"CREATE TABLESPACE small LOCATION '{folder / 'tables'}'")
    try:
        ask(move.format("pg_default", "small"))
        # The functions under test must be able to write that they run.
        ask("ALTER TABLE sample_run SET TABLESPACE pg_default; ALTER INDEX sample_run_pkey SET TABLESPACE pg_default")
        yield
    finally:
        (folder / "filler").unlink(missing_ok=True)
        ask(move.format("small", "pg_default"))
        ask("DROP TABLESPACE small")
        # After a crash the server would look for the folder, if it were in its log since the last checkpoint.
        ask("CHECKPOINT")


def fill(path):
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


#: The pipe ends with this process, whatever the cause is.
MOUNT = 'mount -t tmpfs -o size=32m tmpfs "$1" && echo mounted && read -r end; umount -l "$1"; rmdir "$1"'


@pytest.fixture
def small_disk(server):
    """A file system of 32 MB with a folder ``tables`` for the server."""
    folder = Path(tempfile.mkdtemp(prefix="pglock-disk-", dir="/tmp"))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    holder = subprocess.Popen(["sh", "-c", MOUNT, "sh", folder], text=True, **pipes)
    try:
        if holder.stdout.readline() != "mounted\n":
            pytest.skip("not shown: to mount a small file system needs root on Linux")
        folder.chmod(0o755)
        (folder / "tables").mkdir()
        account(folder, folder / "tables")
        folder.chmod(0o755)
        yield folder
    finally:
        holder.communicate()
