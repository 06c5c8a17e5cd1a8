"""Rescue takes tasks from dead workers and not from living ones, and does not count as a retry."""

from __future__ import annotations

import math
import time
from datetime import timedelta
from types import SimpleNamespace
from uuid import UUID, uuid4

import pytest
from django.db.models.functions import Now
from django.test import override_settings

from django_pglock import enqueue_many
from django_pglock.conf import get_settings
from django_pglock.error_reading import fingerprint_of
from django_pglock.keys import reserved
from django_pglock.models import Attempt, Task
from django_pglock.store import rescue as rescue_module
from django_pglock.store.liveness import missing, silent_after
from django_pglock.store.outcome import Failed, Failure, Interrupted
from django_pglock.store.rescue import (
    LOST_WITH_WORKER,
    RESCUE,
    RESCUED_AT_ONCE,
    ServerTimes,
    interrupted,
    judge,
    possibly_lost,
    rescue,
    server_times,
)
from django_pglock.store.statements import IN_INDEX_ORDER, run
from django_pglock.worker.parent import upkeep as upkeep_module
from tests.db.store.workers import NUMBER, register
from tests.db.worker.conftest import make_upkeep
from tests.sample import keyed_tasks as keyed
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)


FAILURE = Failure("django.db.utils.OperationalError", "Traceback …")


#: The heartbeats of a parent without any interruption.
UNBROKEN = math.inf


def hold_lock(session):
    with session.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_lock(%s, %s)", (reserved.WORKER, NUMBER))


@pytest.mark.parametrize(
    ("silent_for", "has_session", "is_rescued"),
    [
        (0.0, False, False),  # just started, or its lock is behind a pooler
        (90.0, False, False),  # one beat is late
        (200.0, True, False),  # beats are missing, but its session lives: the server was busy
        (200.0, False, True),  # killed
        (320.0, True, False),
        (600.0, True, False),  # its session works, but a person has locked its row, so no beat can be written
        (600.0, False, True),
        (-90.0, False, False),  # the clock was put back a little
        (-200.0, True, False),
        (-200.0, False, True),  # killed, and the clock was put back since
        (-600.0, False, True),
        (200.0, None, False),  # behind a pooler no worker holds a lock, so the heartbeat alone decides
        (420.0, None, False),
        (470.0, None, True),
    ],
)
def test_a_worker_is_dead_by_its_heartbeat_and_its_lock_together(
    claim, session, settings, silent_for, has_session, is_rescued
):
    """The interval and the limit are a hundred times the usual ones, so delays of a slow machine do not matter."""
    settings.DJANGO_PGLOCK = {"HEARTBEAT_INTERVAL": 50.0}
    worker = uuid4()
    register(worker, silent_for=silent_for, **({"lock_key": None} if has_session is None else {}))
    if has_session:
        hold_lock(session)
    tasks.nothing.enqueue()
    claim(worker=worker)
    rescued = rescue("default", unbroken=UNBROKEN)
    assert bool(rescued) == is_rescued
    assert Task.objects.get().status == ("READY" if is_rescued else "RUNNING")


@pytest.mark.parametrize("silent_for", [470.0, 600.0, -600.0])
def test_a_worker_is_dead_by_the_hard_limit_if_the_session_with_its_lock_is_idle(
    claim, session, settings, eventually, silent_for
):
    """A frozen process keeps its session, and so does the server if a host has died. Without the first check, the tasks
    would not run elsewhere within the limit."""
    settings.DJANGO_PGLOCK = {"HEARTBEAT_INTERVAL": 50.0}
    worker = uuid4()
    register(worker, silent_for=silent_for)
    hold_lock(session)
    tasks.nothing.enqueue()
    claim(worker=worker)
    assert not rescue("default", unbroken=UNBROKEN), "its session has just worked"
    # As if that were long ago: a session works for as long as beats may be missing, and here this is a microsecond.
    values = (1e-6, 110.0, silent_after(), 10, 10, 3, "x", "x", "y")
    assert run("default", RESCUE, *values, first=IN_INDEX_ORDER)


@pytest.mark.parametrize(
    ("silent_for", "lock_key", "unbroken", "is_rescued"),
    [
        (10_000.0, NUMBER, 0.0, False),  # it has just connected; the others may connect later
        (10_000.0, NUMBER, 109.0, False),
        (10_000.0, NUMBER, 111.0, True),  # a living worker would have connected by now
        (-10_000.0, NUMBER, 109.0, False),  # the clock was put back
        (-10_000.0, NUMBER, 111.0, True),
        (10_000.0, None, 449.0, False),  # without a lock it may have been silent until the hard limit
        (10_000.0, None, 450.0, True),
    ],
)
def test_a_parent_accuses_nobody_of_a_silence_longer_than_it_can_witness(
    claim, settings, silent_for, lock_key, unbroken, is_rescued
):
    """While the server was unreachable, or after a step of its clock, all heartbeats were missing."""
    settings.DJANGO_PGLOCK = {"HEARTBEAT_INTERVAL": 50.0}
    silent = uuid4()
    register(silent, silent_for=silent_for, lock_key=lock_key)
    tasks.nothing.enqueue()
    claim(worker=silent)
    assert bool(rescue("default", unbroken=unbroken)) == is_rescued


@pytest.mark.parametrize("unbroken", [UNBROKEN, 0.0])
def test_a_worker_without_a_row_is_dead(claim, unbroken):
    """The task must not wait forever, whatever removed the row. (Recovery of another queue joined with that row.) Its
    parent may have seen its death while the server was unreachable for others."""
    tasks.nothing.enqueue()
    [mine] = claim()
    [rescued] = rescue("default", unbroken=unbroken)
    assert (rescued.id, rescued.attempt, rescued.worker, rescued.status) == (mine.id, 1, mine.worker, "READY")
    attempt = Attempt.objects.get()
    assert (attempt.outcome, attempt.number, attempt.worker) == ("LOST", 1, mine.worker)
    assert attempt.worker_name is None, "nobody knows it any more"


def test_a_task_with_the_largest_numbers_is_rescued_with_the_others(claim):
    """A plain INSERT may write these numbers. If the statement failed, no task of a dead worker would be rescued."""
    ids = [int(tasks.nothing.enqueue().id) for _ in range(2)]
    Task.objects.filter(pk=ids[0]).update(attempts=2**31 - 1, rescues=2**15 - 1)
    claim(2)
    assert {each.id: each.status for each in rescue("default", unbroken=UNBROKEN)} == {
        ids[0]: "FAILED",
        ids[1]: "READY",
    }
    assert Task.objects.get(pk=ids[0]).rescues == 2**15 - 1


def test_the_failure_of_a_task_whose_workers_died_is_in_a_group(claim):
    """The server computes the number that a worker computes for a failure without a place."""
    path = "bücher.tasks.\\läuft"
    tasks.nothing.enqueue()
    Task.objects.update(task_path=path, rescues=9)
    claim()
    [rescued] = rescue("default", unbroken=UNBROKEN)
    assert rescued.status == "FAILED"
    [group] = Task.objects.failures()
    assert (group.fingerprint, group.exception) == (fingerprint_of(path, LOST_WITH_WORKER), "WorkerLost")
    assert Task.objects.retry() == 1
    claim()
    Task.objects.update(rescues=0)
    rescue("default", unbroken=UNBROKEN)
    assert Task.objects.get().fingerprint is None, "it has not failed"


def test_the_attempt_of_a_worker_that_died_keeps_its_name(claim, settings):
    settings.DJANGO_PGLOCK = {"HEARTBEAT_INTERVAL": 50.0}
    tasks.nothing.enqueue()
    [mine] = claim()
    register(mine.worker, silent_for=1000.0)
    assert len(rescue("default", unbroken=UNBROKEN)) == 1
    assert Attempt.objects.get().worker_name == "w"


def test_a_rescue_spends_no_retry_and_keeps_the_token(claim):
    tasks.nothing.enqueue()
    claim()
    rescue("default", unbroken=UNBROKEN)
    row = Task.objects.get()
    assert (row.retries, row.rescues, row.attempts, row.worker) == (0, 1, 1, None)


def test_workers_are_woken_for_rescued_tasks_that_they_can_claim(claim, monkeypatch):
    """Admission wakes them for a task with a key, and a task that has ended is nothing to claim."""
    woken = []
    monkeypatch.setattr(rescue_module, "wake", lambda using, queues: woken.extend(queues))
    tasks.nothing.using(queue_name="mail").enqueue()
    keyed.step.using(queue_name="keyed").enqueue("a")
    asked = tasks.nothing.using(queue_name="asked").enqueue()
    for queue in ("mail", "keyed", "asked"):
        claim(queue=queue)
    Task.objects.filter(pk=asked.id).update(cancel_requested_at=Now())
    assert len(rescue("default", unbroken=UNBROKEN)) == 3
    assert woken == ["mail"]


@override_settings(DJANGO_PGLOCK={"MAX_RESCUES": 2})
def test_a_poison_pill_ends_failed(claim):
    """A task that kills each worker must not be rescued forever."""
    result = tasks.nothing.using(keep_result=60).enqueue()
    for _ in range(3):
        claim()
        assert Task.objects.get().expires_at is None
        rescue("default", unbroken=UNBROKEN)
    row = Task.objects.get()
    assert timedelta(seconds=59) < row.expires_at - row.finished_at < timedelta(seconds=61)
    assert (row.status, row.rescues, Attempt.objects.count()) == ("FAILED", 3, 3)
    result.refresh()
    assert [error.exception_class_path for error in result.errors] == ["django_pglock.errors.WorkerLost"] * 3
    assert result.errors[0].exception_class.__name__ == "WorkerLost"
    assert result.attempts == 3


@pytest.mark.parametrize(
    ("silent_for", "has_session", "count"), [(90.0, True, 0), (200.0, True, 2), (0.0, False, 2), (200.0, False, 2)]
)
def test_a_task_is_possibly_lost_when_its_heartbeat_or_session_is_missing(
    claim, session, settings, silent_for, has_session, count
):
    """A draining worker waits for such tasks, because they are rescued soon."""
    settings.DJANGO_PGLOCK = {"HEARTBEAT_INTERVAL": 50.0}
    worker = uuid4()
    register(worker, silent_for=silent_for)
    if has_session:
        hold_lock(session)
    for _ in range(3):
        tasks.nothing.enqueue()
    claim(2, worker=worker)
    found = [("default", count)] if count else []
    assert possibly_lost("default") == possibly_lost("default", backend="default") == found
    assert possibly_lost("default", backend="other") == []


@pytest.mark.usefixtures("without_indexes")
def test_tasks_of_each_dead_worker_are_rescued_whatever_the_plan(claim):
    for number in (3, 1, 4, 2):
        tasks.nothing.enqueue()
        claim(worker=UUID(int=number))
    assert possibly_lost("default") == [("default", 4)]
    assert sorted(each.worker.int for each in rescue("default", unbroken=UNBROKEN)) == [1, 2, 3, 4]


def test_a_locked_row_is_rescued_later(claim, locked):
    """It may be settled at this moment."""
    first, second = (int(tasks.nothing.enqueue().id) for _ in range(2))
    claim(2)
    with locked(first):
        assert [each.id for each in rescue("default", unbroken=UNBROKEN)] == [second]
    assert [each.id for each in rescue("default", unbroken=UNBROKEN)] == [first]


@pytest.mark.parametrize(
    "change", [{"attempts": 2, "worker": uuid4()}, {"status": "SUCCESSFUL", "finished_at": Now()}], ids=" ".join
)
def test_a_task_that_was_claimed_again_or_has_ended_since_rescue_read_it_is_not_rescued(
    claim, session, in_threads, eventually, monkeypatch, change
):
    """Here rescue pauses between its snapshot and the lock on the row."""
    pause = "CROSS JOIN (SELECT pg_advisory_xact_lock(1)) AS pause"
    pausing = RESCUE.replace("ARRAY(SELECT id FROM orphan)", f"ARRAY(SELECT id FROM orphan {pause})")
    monkeypatch.setattr(rescue_module, "RESCUE", pausing)
    waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    tasks.nothing.enqueue()
    [lost] = claim()
    session.ensure_connection()
    session.connection.execute("SELECT pg_advisory_lock(1)")

    def act(number):
        if number == 0:
            return rescue("default", unbroken=UNBROKEN)
        eventually(lambda: session.connection.execute(waiting).fetchone() == (1,), why="rescue does not pause")
        Task.objects.filter(pk=lost.id).update(**change)
        session.connection.execute("SELECT pg_advisory_unlock(1)")

    assert in_threads(act, 2) == [[], None]
    assert Task.objects.get().status == change.get("status", "RUNNING")


@pytest.fixture
def upkeep(monkeypatch):
    """An upkeep whose parent has beaten without interruption by its own clock, and the server's clock."""
    server = [1_000_000.0]
    monkeypatch.setattr(upkeep_module, "clock", lambda using: server[0] + time.monotonic())
    made = make_upkeep(unbroken_for=UNBROKEN)
    made.server = server

    def round_with_rescue():
        made._rescued_at = 0.0
        made._round()
        return Task.objects.filter(rescues=1).count()

    made.round_with_rescue = round_with_rescue
    return made


def test_rounds_of_upkeep_rescue_all_tasks_of_a_dead_worker(upkeep, claim):
    """The tasks beyond the limit of a statement are rescued by the next rounds, which come at once."""
    count = 2 * RESCUED_AT_ONCE + 1
    enqueue_many(tasks.nothing, [{}] * count)
    claim(count)
    upkeep.round_with_rescue()
    while upkeep._rescued_at <= 0.0:
        upkeep._round()
    assert Task.objects.filter(rescues=1).count() == count


@pytest.mark.parametrize("step", [3600, -3600])
def test_a_step_of_the_servers_clock_condemns_no_living_worker(upkeep, claim, settings, monkeypatch, step):
    """The parent has beaten without interruption, as far as it knows. All heartbeats are from before the step. The same
    is seen after all hosts have slept: this process's clock has stood still."""
    settings.DJANGO_PGLOCK = {"HEARTBEAT_INTERVAL": 50.0}
    worker = uuid4()
    register(worker)
    tasks.nothing.enqueue()
    claim(worker=worker)
    upkeep._stepped_at = -UNBROKEN
    upkeep._clock_ahead = upkeep.server[0]
    assert upkeep.round_with_rescue() == 0
    register(worker, silent_for=step)
    upkeep.server[0] += step
    assert upkeep.round_with_rescue() == 0, "this round is the first one after the step"
    assert upkeep.round_with_rescue() == 0, "a living worker may beat later"
    upkeep._stepped_at -= missing()
    assert upkeep.round_with_rescue() == 1, "a living worker would have beaten by now"


@pytest.mark.parametrize(
    ("times", "is_own"),
    [
        (ServerTimes(session=90, server=10, recovery=5), True),  # this session lives, that of the task does not
        (ServerTimes(session=101, server=10, recovery=100.5), True),  # a session has crashed the server
        (ServerTimes(session=101, server=10, recovery=5), False),  # a network, a pooler, an operator, a failover
        (ServerTimes(session=101, server=100.4, recovery=100.5), False),  # a host, or the whole server
        (ServerTimes(session=None, server=10, recovery=None), False),  # the role may not see it
    ],
)
def test_a_lost_session_counts_as_rescue_only_if_there_was_no_outage(times, is_own):
    """An outage fails nobody, however often."""
    suspect = Interrupted(FAILURE, 1, is_suspect=True)
    claim = SimpleNamespace(rescues=get_settings().MAX_RESCUES, last_attempted_at="100.0")
    verdict = judge(claim, suspect, times)
    if not is_own:
        assert verdict == Interrupted(FAILURE, 1)
        return
    assert isinstance(verdict, Failed)
    assert "cut off 4 times" in verdict.failure.traceback
    claim.rescues -= 1
    assert judge(claim, suspect, times) == Interrupted(FAILURE, 1, rescued=1)


@pytest.mark.django_db
def test_the_server_says_since_when_it_and_the_session_work(claim):
    tasks.nothing.enqueue()
    [claimed] = claim()
    times = server_times("default")
    assert times.server < times.session < float(claimed.last_attempted_at)
    assert times.show_no_outage(float(claimed.last_attempted_at))
    assert not times.show_no_outage(times.session)


def test_pauses_grow_while_a_task_is_cut_off_again_and_again():
    def pause(number, *, retries=0):
        return interrupted(SimpleNamespace(number=number, retries=retries), ValueError()).delay

    for number, bound in enumerate((0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 120, 120), start=1):
        assert bound / 2 <= pause(number) <= bound
    assert pause(3, retries=2) <= 0.25, "those were failures"


def test_a_role_that_may_not_ask_counts_everything_as_an_outage(monkeypatch):
    monkeypatch.setattr(rescue_module, "SERVER_TIMES", "SELECT missing()")
    assert not server_times("default").show_no_outage(time.time())
