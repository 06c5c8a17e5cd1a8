"""Faults between workers and the server: connections that are cut, slow or half open, and PgBouncer."""

from __future__ import annotations

import signal
import time

import pytest
from django.db import connection
from django.db.models import Max
from django.db.models.functions import Extract, Now

from django_pglock.conf import Settings
from django_pglock.keys.reserved import WORKER
from django_pglock.models import Attempt, Task, Worker
from qa.chaos.experiment import Fault
from tests.pgbouncer import PROGRAM, PgBouncer, way_to_server
from tests.proxy import Proxy
from tests.sample import chaos_tasks
from tests.sample.models import Run
from tests.sql import execute_sql

#: Seconds until a worker works again once it can.
AGAIN = 10.0
#: Seconds within which a message arrives that was sent before a fault.
IN_TRANSIT = 1.0
#: Heartbeats for the short form.
QUICK = {"HEARTBEAT_INTERVAL": 0.8}


@pytest.fixture
def beats(is_short):
    """Settings of the heartbeats, and the seconds after which the tasks of a silent worker run elsewhere.

    These are the hard limit, a round of upkeep, and the time of the new claim.
    """
    pglock = QUICK if is_short else {}
    settings = Settings(**pglock)
    return pglock, settings.HEARTBEAT_LIMIT + settings.HEARTBEAT_INTERVAL + 2


@pytest.fixture
def proxy(server):
    with Proxy(str(server.folder)) as proxy:
        yield proxy


@pytest.mark.short
@pytest.mark.fault("a worker's connections are swallowed")
def test_a_worker_behind_a_black_hole(proxy, experiment, beats, eventually):
    settings, bound = beats
    victim = experiment.start("--threads", "2", url=proxy.url("postgres"), pglock=settings)
    experiment.worker("--threads", "2", pglock=settings)
    experiment.wait_until_ready(victim)

    def is_at_work():
        # A claim whose answer is swallowed has no outcome, if the worker gives up its session before the end of the
        # hole. So one of its tasks must have begun, and not ended.
        runs = Run.objects.filter(worker=victim.id, ended_at=None, task__in=experiment.in_flight(victim.id))
        return experiment.running(4) and runs.exists()

    def is_caught_at_work():
        if not is_at_work():
            return False
        proxy.black_hole()
        if not is_at_work():
            proxy.pass_through()
            return False
        return True

    eventually(experiment.under_load(is_caught_at_work, seconds=0.5), why="the work did not begin")
    fault = Fault(victim.id, time.time(), experiment.in_flight(victim.id))
    assert fault.in_flight, "the victim had no task in flight"
    eventually(experiment.is_over, why="some task is stuck")
    proxy.pass_through()
    since = time.time()
    experiment.out_of_reach(victim.id, fault.at, since)
    eventually(lambda: "was lost" in victim.output, why="the victim did not come back with any outcome")
    eventually(experiment.all_begin([victim], since), why="the victim does not work again")
    eventually(experiment.is_over, why="some task is stuck")
    evidence = experiment.judge()
    recovery = evidence.recovery(fault.in_flight, fault.victim, fault.at)
    experiment.show("its tasks run elsewhere", recovery.last, bound)
    experiment.show("others continue", recovery.others, 2)
    experiment.show("it works again after the end", evidence.begins(victim.id, since), AGAIN)


@pytest.fixture
def wait_until_busy(experiment, eventually):
    """Wait until each of four threads of each worker has a session, and runs a task."""

    def wait(workers):
        # A thread connects a moment after its first claim, so the number of claims is not enough.
        eventually(experiment.all_threads_begin(workers, 0.0, 4), why="some thread did not begin")
        eventually(experiment.is_over, why="some task is stuck")
        busy = experiment.under_load(
            lambda: all(len(experiment.in_flight(worker.id)) == 4 for worker in workers), seconds=1.0
        )
        eventually(busy, why="the work did not begin")

    return wait


@pytest.mark.short
@pytest.mark.fault("a proxy forgets the connections of three workers and keeps acknowledging")
def test_half_open_connections(proxy, experiment, beats, wait_until_busy, eventually, is_short):
    """Only the existing connections. All twelve threads run a task, most of them in a transaction.

    Nothing but their timeout ends the waits of the tasks.
    """
    settings, _ = beats
    workers = experiment.workers(3, "--threads", "4", url=proxy.url("postgres"), pglock=settings, CHAOS_TIMEOUT="15")
    moments = []
    for _ in range(1 if is_short else 3):
        wait_until_busy(workers)
        proxy.black_hole(new=False)
        moments.append(time.time())
        eventually(
            experiment.all_threads_begin(workers, moments[-1] + IN_TRANSIT, 4), seconds=300, why="a thread hangs"
        )
        eventually(experiment.is_over, why="some task is stuck")
    evidence = experiment.judge()
    experiment.show("the last of twelve threads begins a task again", last_thread(evidence, workers, moments), 60)
    experiment.affirm(
        "the log names a task whose connection was closed",
        is_kept=any("executes a statement that" in each.output for each in workers),
    )


def last_thread(evidence, workers, moments):
    """Return the greatest time, over several moments, until the last thread of these workers began a task again."""
    begins = [evidence.begins_of_threads(each.id, at + IN_TRANSIT) for each in workers for at in moments]
    return IN_TRANSIT + max(seconds for of_worker in begins for seconds in of_worker.values())


@pytest.fixture
def poolers(tmp_path):
    """Two PgBouncers; the address of both, as a DATABASE_URL; and a function that has the address lead to one of them.

    The address is a symbolic link to the socket of one. So a client that connects again reaches the other one.
    """
    connection.ensure_connection()
    databases = {"postgres": f"{way_to_server(connection.connection.info)} pool_size=20"}
    socket = tmp_path / ".s.PGSQL.5432"

    def lead_to(pooler):
        link = tmp_path / "link"
        link.symlink_to(pooler.folder / socket.name)
        link.replace(socket)

    with PgBouncer(databases) as first, PgBouncer(databases) as second:
        lead_to(first)
        yield first, second, f"postgres://postgres@/{tmp_path}/postgres", lead_to


@pytest.mark.skipif(PROGRAM is None, reason="not shown: no PgBouncer on this machine")
@pytest.mark.fault("PgBouncer is frozen, and another one takes its address")
def test_a_frozen_pgbouncer(experiment, poolers, wait_until_busy, eventually):
    """The kernel accepts the data for the frozen pooler. The server never gets the data that was not passed on."""
    first, second, url, lead_to = poolers
    workers = experiment.workers(3, "--threads", "4", url=url, CHAOS_TIMEOUT="15")
    wait_until_busy(workers)
    first.send(signal.SIGSTOP)
    lead_to(second)
    at = time.time()
    eventually(experiment.all_threads_begin(workers, at + IN_TRANSIT, 4), seconds=300, why="a thread hangs")
    # Until then the server keeps its transactions open, and the locks of their rows.
    first.send(signal.SIGKILL)
    eventually(experiment.is_over, why="some task is stuck")
    evidence = experiment.judge()
    experiment.show("the last of twelve threads begins a task again", last_thread(evidence, workers, [at]), 60)
    for worker in workers:
        worker.end()


@pytest.mark.short
@pytest.mark.fault("all connections are reset ten times a second")
def test_dense_cuts(proxy, experiment, eventually, is_short):
    """Atomic tasks are cut off more often than MAX_RESCUES within seconds, and none of them fails for that reason."""
    workers = experiment.workers(2, "--threads", "2", url=proxy.url("postgres"))
    atomic = []
    while Attempt.objects.filter(outcome="LOST").count() <= 5:
        atomic += experiment.expect(*[chaos_tasks.work_atomically.enqueue(0.3) for _ in range(20)])
        eventually(lambda: experiment.in_flight(workers[0].id), why="the work did not begin")
        end = time.monotonic() + (3 if is_short else 60)
        while time.monotonic() < end:
            proxy.cut()
            time.sleep(0.1)
        since = time.time()
        eventually(experiment.is_over, why="some task is stuck")
        done = time.time()
    experiment.judge()
    experiment.affirm(
        "and none is counted as rescued", is_kept=not Task.objects.filter(pk__in=atomic, rescues__gt=0).exists()
    )
    # A pause before the next attempt is at most as long as the cuts have lasted by then.
    experiment.show("all is done", done - since, 30 if is_short else 130)


@pytest.mark.fault("200 ms on every message of a worker")
def test_a_worker_far_away(proxy, experiment, eventually):
    proxy.delay(0.2)
    victim = experiment.worker("--threads", "2", url=proxy.url("postgres"))
    experiment.load(10)
    oldest, end = 0.0, time.monotonic() + 60
    while not experiment.is_over() and time.monotonic() < end:
        age = Worker.objects.annotate(age=Extract(Now() - Max("heartbeat_at"), "epoch")).get(pk=victim.id).age
        oldest = max(oldest, float(age))
        time.sleep(0.1)
    experiment.judge()
    experiment.affirm("nothing is taken from it", is_kept=not Attempt.objects.exists())
    experiment.show("its heartbeat is never older", oldest, 2 * 3.0)


def locks_of_workers():
    return execute_sql("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND classid = %s", [WORKER])[0][0]


@pytest.mark.short
@pytest.mark.skipif(PROGRAM is None, reason="not shown: no PgBouncer on this machine")
@pytest.mark.fault("SIGKILL of a worker behind PgBouncer in transaction mode")
def test_a_killed_worker_behind_pgbouncer(experiment, beats, eventually):
    """No worker holds a lock there, so no missing lock shows the death. Only the heartbeat does."""
    settings, bound = beats
    connection.ensure_connection()
    with PgBouncer({"postgres": f"{way_to_server(connection.connection.info)} pool_size=20"}) as pgbouncer:
        workers = experiment.workers(3, "--threads", "2", url=pgbouncer.url("postgres"), pglock=settings)
        everybody = {worker.id for worker in workers}
        # The third worker polls after some seconds, because nothing wakes it.
        begun = experiment.under_load(
            lambda: (
                set(Run.objects.values_list("worker", flat=True)) == everybody and experiment.in_flight(workers[0].id)
            ),
            0.5,
        )
        eventually(begun, why="not all have begun")
        fault = experiment.send_signal(workers[0], signal.SIGKILL)
        assert fault.in_flight, "the victim had no task in flight"
        eventually(experiment.is_over, why="some task is stuck")
        experiment.affirm("no worker leaves a session lock in the pool", is_kept=locks_of_workers() == 0)
        for worker in workers:
            worker.end()
    evidence = experiment.judge()
    recovery = evidence.recovery(fault.in_flight, fault.victim, fault.at)
    experiment.show("its tasks run elsewhere", recovery.last, bound)
    # No worker is notified here: a sleeping worker finds the tasks at its next poll.
    experiment.show("others continue", recovery.others, 6)
    experiment.affirm("all workers take part", is_kept=set(Run.objects.values_list("worker", flat=True)) == everybody)
