"""Faults of workers: signals, deploys, wrong clocks, and tasks that crash their process."""

from __future__ import annotations

import signal
import time
from datetime import timedelta

import psycopg
import pytest
from django.db import transaction
from django.db.models import Max
from django.utils import timezone

from django_pglock.conf import Settings
from django_pglock.models import Attempt, Task, Worker
from django_pglock.worker.worker import HANDOVER_DELAY
from tests.sample import chaos_tasks
from tests.sample.models import Run

#: Quick heartbeats, where the short form cannot wait for the default limit.
QUICK = {"HEARTBEAT_INTERVAL": 1.0, "HEARTBEAT_LIMIT": 8.0, "POLL_INTERVAL": 2.0}


@pytest.mark.short
@pytest.mark.fault("SIGKILL of a worker")
def test_a_killed_worker(stage, eventually):
    victim, *_others = stage.workers(3, "--threads", "2")
    begun = stage.under_load(lambda: stage.running(10) and stage.hands(victim.id), seconds=0.5)
    eventually(begun, why="the work did not begin")
    blow = stage.strike(victim, signal.SIGKILL)
    assert blow.hands, "the victim had nothing in hand"
    eventually(stage.is_over, why="some task is stuck")
    recovery = stage.judge().recovery(blow.hands, blow.victim, blow.at)
    stage.show("its tasks run elsewhere", recovery.last, bound=10)
    stage.show("others continue", recovery.others, bound=2)


@pytest.mark.parametrize(
    ("whom", "fault"),
    [
        pytest.param("workers", "SIGKILL of all workers at once", marks=pytest.mark.short),
        pytest.param(
            "everything", "SIGKILL of all workers at once, and of their heartbeat processes, as with their host"
        ),
    ],
)
@pytest.mark.fault("SIGKILL of all workers at once")
def test_all_workers_dead_at_once(stage, eventually, whom, fault):
    """No worker is left that has seen the dead ones alive. New workers start at once, as with a supervisor."""
    stage.fault = fault
    crew = stage.workers(3, "--threads", "2")
    busy = stage.under_load(lambda: all(stage.hands(each.id) for each in crew), seconds=0.5)
    eventually(busy, why="not all have begun")
    if whom == "everything":
        stage.kill_heartbeat_processes(*crew)
    hands = [stage.stop_at_work(member.process.pid, member.id) for member in crew]
    assert all(hands), "a victim had nothing in hand"
    at = time.time()
    for member in crew:
        member.send(signal.SIGKILL)
    for member in crew:
        member.wait()
    stage.workers(2, "--threads", "4")
    started = time.time() - at
    eventually(stage.is_over, why="some task is stuck")
    recovery = stage.judge().recovery(set().union(*hands), None, at)
    # The time that a process takes to start depends on the machine.
    stage.show("their tasks run elsewhere, once others have started", max(0.0, recovery.last - started), bound=10)


@pytest.mark.fault("SIGTERM, tasks shorter than the grace")
def test_a_worker_that_ends_in_order(stage, eventually):
    victim, *_others = stage.workers(2, "--threads", "2")
    eventually(stage.under_load(lambda: len(stage.hands(victim.id)) >= 2, seconds=0.7), why="the work did not begin")
    blow = stage.strike(victim, signal.SIGTERM)
    assert blow.hands, "the victim had nothing in hand"
    assert victim.wait() == 0
    eventually(stage.is_over, why="some task is stuck")
    stage.judge()
    assert not Attempt.objects.exists(), "a task that runs is left to finish"
    stage.show("the worker ends as soon as its tasks have", victim.ended_at - blow.at, bound=0.7 + 2)


@pytest.mark.short
@pytest.mark.fault("SIGTERM, tasks longer than the grace")
def test_a_worker_whose_grace_is_over(stage, eventually):
    victim = stage.worker("--threads", "6", "--grace", "1")
    stage.worker("--threads", "6")
    eventually(stage.under_load(lambda: len(stage.hands(victim.id)) == 6, seconds=4), why="the work did not begin")
    blow = stage.strike(victim, signal.SIGTERM)
    assert victim.wait() == 0
    eventually(stage.is_over, why="some task is stuck")
    recovery = stage.judge().recovery(blow.hands, blow.victim, blow.at + 1)
    assert Task.objects.filter(pk__in=blow.hands, attempts=2).exists(), "nothing was interrupted"
    assert not Attempt.objects.exists(), "neither a retry nor a rescue is spent"
    stage.show("the worker ends", victim.ended_at - blow.at, bound=1 + 2)
    # The other worker is busy: its next thread is free after one task, of four seconds.
    stage.show(
        "its tasks run elsewhere, where each thread is busy for 4 s", recovery.last, bound=HANDOVER_DELAY + 4 + 1
    )


@pytest.mark.parametrize("pglock", [pytest.param(QUICK, id="quick"), pytest.param({}, id="default")])
@pytest.mark.fault("SIGSTOP for longer than HEARTBEAT_LIMIT, then SIGCONT")
def test_a_zombie(stage, eventually, pglock):
    """Other workers run all its tasks. When it continues, its outcomes are dropped, and it works again."""
    limit = Settings(**pglock).HEARTBEAT_LIMIT
    zombie, *_others = stage.workers(3, "--threads", "3", pglock=pglock)
    begun = stage.under_load(lambda: stage.running(9) and stage.hands(zombie.id), seconds=0.5)
    eventually(begun, why="the work did not begin")
    blow = stage.strike(zombie, signal.SIGSTOP)
    assert blow.hands, "the victim had nothing in hand"
    eventually(stage.is_over, why="some task is stuck")
    before = dict(Task.objects.values_list("pk", "finished_at"))
    stage.strike(zombie, signal.SIGCONT)
    eventually(lambda: not Run.objects.filter(worker=zombie.id, ended_at=None).exists(), why="it does not wake")
    zombie.wait_for("was lost")
    assert dict(Task.objects.values_list("pk", "finished_at")) == before, "an outcome came too late and was written"
    evidence = stage.judge()
    recovery = evidence.recovery(blow.hands, blow.victim, blow.at)
    stage.show(f"its tasks run elsewhere (limit: {limit:.0f} s)", recovery.last, bound=limit)
    stage.show("others continue", recovery.others, bound=2)
    runs = Run.objects.filter(worker=zombie.id).count()
    again = stage.under_load(lambda: Run.objects.filter(worker=zombie.id).count() > runs)
    eventually(again, why="the zombie does not work again")


@pytest.mark.short
@pytest.mark.fault("clocks of workers wrong by an hour")
def test_wrong_clocks(stage, eventually):
    """The others check heartbeats, promote due tasks and rescue, and use no clock of their own for it."""
    stage.worker("--threads", "2", CHAOS_CLOCK="3600")
    told = chaos_tasks.tell_time.enqueue()
    assert told.wait(60).return_value > time.time() + 3500, "the clock is right"
    Task.objects.all().delete()
    stage.worker("--threads", "2", CHAOS_CLOCK="-3600")
    victim = stage.worker("--threads", "2")
    due = timezone.now() + timedelta(seconds=4)
    later = stage.expect(chaos_tasks.work.using(run_after=due).enqueue(0))
    begun = stage.under_load(lambda: Run.objects.filter(worker=victim.id).count() > 5, seconds=0.1)
    eventually(begun, why="the work did not begin")
    blow = stage.strike(victim, signal.SIGKILL)
    assert blow.hands, "the victim had nothing in hand"
    eventually(stage.is_over, why="some task is stuck")
    recovery = stage.judge().recovery(blow.hands, blow.victim, blow.at)
    stage.show("the tasks of a killed worker run elsewhere", recovery.last, bound=10)
    assert set(Attempt.objects.values_list("worker", flat=True)) <= {victim.id}, "a living worker was taken for dead"
    lateness = (Run.objects.get(task=later[0]).started_at - due).total_seconds()
    assert lateness >= 0, "it ran too early"
    stage.show("a scheduled task runs when it is due", lateness, bound=5)


@pytest.mark.parametrize("how", chaos_tasks.FATAL)
@pytest.mark.fault("a task takes its worker down")
def test_a_task_that_takes_its_worker_down(stage, eventually, how):
    stage.fault = f"a task takes its worker down: {how}"
    stage.workers(2, "--threads", "2")
    stage.load(10, seconds=0.2)
    stage.expect(chaos_tasks.take_down.enqueue(how))
    eventually(lambda: any(member.ended_at for member in stage.crew), why="nobody went down")
    (victim,) = [member for member in stage.crew if member.ended_at]
    eventually(lambda: stage.replace_dead() and stage.is_over(), why="some task is stuck")
    evidence = stage.judge()
    # This test notices the death after the heartbeat process has reported it, and perhaps after its tasks run
    # elsewhere.
    last_begun = max(run.started for run in evidence.runs if run.worker == victim.id)
    recovery = evidence.recovery(evidence.unfinished(victim.id), victim.id, last_begun)
    stage.show("its tasks run elsewhere", recovery.last, bound=10)


@pytest.mark.short
@pytest.mark.fault("a task eats all memory that its process may have")
def test_a_task_that_eats_memory(stage, eventually):
    """MemoryError is a failure like others: it is tried again, then it is FAILED, and all other workers continue."""
    stage.workers(2, "--threads", "2", CHAOS_MEMORY="1024")
    hungry = stage.expect(*[chaos_tasks.eat.enqueue() for _ in range(3)])
    stage.load(20)
    eventually(stage.is_over, why="some task is stuck")
    stage.judge("it fails by itself; nothing else is lost, stuck, or fails", may_fail=hungry)
    errors = Attempt.objects.filter(task__in=hungry)
    assert set(errors.values_list("exception_path", flat=True)) == {"builtins.MemoryError"}
    assert errors.count() == 2 * len(hungry)
    assert all(member.ended_at is None for member in stage.crew), "a worker went down"


@pytest.mark.short
@pytest.mark.fault("a poison pill: its worker dies each time")
def test_a_poison_pill(stage, eventually):
    """Long tasks run in the same process each time, so each crash ends them, too. They must not fail."""
    stage.workers(1, "--threads", "4", pglock=QUICK)
    with transaction.atomic():
        pill = stage.expect(chaos_tasks.take_down.enqueue("out-of-memory kill", times=1000, after=0.3))
        innocent = stage.expect(*[chaos_tasks.work.enqueue(1.5) for _ in range(3)])
    eventually(lambda: stage.replace_dead() and stage.is_over(), why="some task is stuck")
    stage.judge("it ends FAILED, and nobody else does", may_fail=pill)
    row = Task.objects.get(pk=pill[0])
    assert row.status == "FAILED"
    assert row.rescues == Settings().MAX_RESCUES + 1
    went_down = Task.objects.filter(pk__in=innocent).aggregate(Max("rescues"))["rescues__max"]
    assert went_down >= Settings().MAX_RESCUES, "nobody was beside it"


@pytest.mark.parametrize("count", [5, 50])
@pytest.mark.fault("deploys in a row: SIGTERM and a new worker")
def test_deploys_in_a_row(stage, eventually, count):
    stage.fault = f"{count} deploys in a row: SIGTERM and a new worker, under load"
    stage.workers(2, "--threads", "2")
    for _round in range(count):
        stage.load(8, seconds=0.1)
        old = next(member for member in stage.crew if member.ended_at is None)
        stage.strike(old, signal.SIGTERM)
        stage.worker("--threads", "2")
        assert old.wait() == 0
    eventually(stage.is_over, why="some task is stuck")
    stage.judge()
    assert not Attempt.objects.exists(), "no task is interrupted"
    assert Worker.objects.count() == 2, "whoever ends signs off"


@pytest.mark.fault("two versions of the code at once")
def test_two_versions_of_the_code(stage, eventually):
    stage.workers(2, "--threads", "2", CHAOS_CODE="old")
    new = stage.expect(*[chaos_tasks.work_newly.enqueue(0.05) for _ in range(20)])
    stage.load(10)
    others = Task.objects.exclude(pk__in=new)
    eventually(lambda: not others.filter(finished_at=None).exists(), why="known tasks have to wait")
    waiting = Task.objects.filter(pk__in=new)
    assert set(waiting.values_list("status", "attempts")) == {("READY", 0)}, "an old worker touched a new task"
    began = time.time()
    worker = stage.worker("--threads", "2")
    eventually(stage.is_over, why="some task is stuck")
    evidence = stage.judge()
    assert {run.worker for run in evidence.runs if run.task in new} == {worker.id}
    assert waiting.aggregate(Max("attempts"))["attempts__max"] == 1, "an attempt was spent"
    stage.show("new tasks wait for a new worker, and run then", evidence.recovery(new, None, began).last, bound=15)


@pytest.mark.parametrize("count", [pytest.param(200, marks=pytest.mark.short), 3000])
@pytest.mark.fault("a long transaction holds back vacuum")
def test_a_long_transaction(stage, eventually, count):
    """Dead rows stay in the indexes. Claims must not read all of them each time."""
    stage.workers(2, "--threads", "4")
    with psycopg.connect(host=str(stage.server.folder), user="postgres", dbname="postgres") as holder:
        holder.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        holder.execute("SELECT pg_current_xact_id()")
        stage.load(count, seconds=0)
        eventually(stage.is_over, seconds=500, why="some task is stuck")
        began = time.time()
        last = stage.expect(chaos_tasks.work.enqueue(0))
        eventually(stage.is_over, why="the last one is stuck")
        evidence = stage.judge()
        stage.show(f"a task starts, after {3 * count} others", evidence.recovery(last, None, began).last, bound=1)
