"""Faults of workers: signals, deploys, wrong clocks, and a task that kills its process."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import pytest
from django.db import transaction
from django.db.models import Max
from django.utils import timezone

from django_pglock.conf import Settings
from django_pglock.models import Attempt, Task, Worker
from django_pglock.worker.child.child import HANDOVER_DELAY
from tests.sample import chaos_tasks
from tests.sample.models import Run

#: Quick heartbeats, where the short form cannot wait for the default limit.
QUICK = {"HEARTBEAT_INTERVAL": 0.8, "POLL_INTERVAL": 2.0}


@pytest.mark.short
@pytest.mark.fault("SIGKILL of a worker")
def test_a_killed_worker(experiment, hit, recovery_after):
    victim, *_others = experiment.workers(3, "--threads", "2")
    recovery = recovery_after(hit(victim))
    experiment.show("its tasks run elsewhere", recovery.last, bound=10)
    experiment.show("others continue", recovery.others, bound=2)


@pytest.mark.short
@pytest.mark.fault("SIGKILL of all workers at once, as with their host")
def test_all_workers_dead_at_once(experiment, eventually):
    """No worker is left that has seen the dead ones alive. New workers start at once, as by a service manager."""
    workers = experiment.workers(3, "--threads", "2")
    busy = experiment.under_load(lambda: all(experiment.in_flight(each.id) for each in workers), seconds=0.5)
    eventually(busy, why="not all have begun")
    in_flight = [experiment.stop_at_work(worker.child, worker.id) for worker in workers]
    assert all(in_flight), "a victim had no task in flight"
    at = time.time()
    for worker in workers:
        worker.send(signal.SIGKILL)
    for worker in workers:
        worker.wait()
    experiment.workers(2, "--threads", "4")
    started = time.time() - at
    eventually(experiment.is_over, why="some task is stuck")
    recovery = experiment.judge().recovery(set().union(*in_flight), None, at)
    # The time that a process takes to start depends on the machine.
    experiment.show("their tasks run elsewhere, once others have started", max(0.0, recovery.last - started), bound=10)


@pytest.mark.short
@pytest.mark.fault("SIGKILL of a child")
def test_a_killed_child(experiment, eventually):
    process = experiment.start("--processes", "2", "--threads", "2")
    eventually(lambda: process.output.count("is ready") == 2, why="the processes did not start")
    victim, other = Worker.objects.order_by("pid")
    begun = experiment.under_load(lambda: experiment.running(20) and experiment.in_flight(victim.pk), seconds=0.5)
    eventually(begun, why="the work did not begin")
    in_flight = experiment.stop_at_work(victim.pid, victim.pk)
    assert in_flight, "the victim had no task in flight"
    at = time.time()
    os.kill(victim.pid, signal.SIGKILL)
    eventually(lambda: Worker.objects.exclude(pk__in=[victim.pk, other.pk]).exists(), why="not replaced")
    experiment.show("it is replaced", time.time() - at, bound=2)
    eventually(experiment.is_over, why="some task is stuck")
    recovery = experiment.judge().recovery(in_flight, victim.pk, at)
    experiment.show("its tasks run again", recovery.last, bound=2)
    experiment.show("others continue", recovery.others, bound=2)


@pytest.mark.fault("SIGTERM, tasks longer than the grace")
def test_a_worker_whose_grace_is_over(experiment, eventually):
    victim = experiment.worker("--threads", "6", "--grace", "1")
    experiment.worker("--threads", "6")
    eventually(
        experiment.under_load(lambda: len(experiment.in_flight(victim.id)) == 6, seconds=4),
        why="the work did not begin",
    )
    fault = experiment.send_signal(victim, signal.SIGTERM)
    assert victim.wait() == 0
    eventually(experiment.is_over, why="some task is stuck")
    recovery = experiment.judge().recovery(fault.in_flight, fault.victim, fault.at + 1)
    assert Task.objects.filter(pk__in=fault.in_flight, attempts=2).exists(), "nothing was interrupted"
    assert not Attempt.objects.exists(), "neither a retry nor a rescue is spent"
    experiment.show("the worker ends", victim.ended_at - fault.at, bound=1 + 2)
    # The other worker is busy: its next thread is free after one task, of four seconds.
    experiment.show(
        "its tasks run elsewhere, where each thread is busy for 4 s", recovery.last, bound=HANDOVER_DELAY + 4 + 1
    )


@pytest.mark.parametrize("pglock", [pytest.param(QUICK, id="quick"), pytest.param({}, id="default")])
@pytest.mark.fault("SIGSTOP for longer than the hard limit, then SIGCONT")
def test_a_zombie(experiment, hit, recovery_after, eventually, pglock):
    """Other workers run all its tasks. When it continues, its outcomes are dropped, and it works again."""
    limit = Settings(**pglock).HEARTBEAT_LIMIT
    zombie, *_others = experiment.workers(3, "--threads", "3", pglock=pglock)
    fault = hit(zombie, signal.SIGSTOP)
    eventually(experiment.is_over, why="some task is stuck")
    before = dict(Task.objects.values_list("pk", "finished_at"))
    experiment.send_signal(zombie, signal.SIGCONT)
    eventually(lambda: not Run.objects.filter(worker=zombie.id, ended_at=None).exists(), why="it does not wake")
    zombie.wait_for("was lost")
    assert dict(Task.objects.values_list("pk", "finished_at")) == before, "an outcome came too late and was written"
    recovery = recovery_after(fault)
    experiment.show(f"its tasks run elsewhere (limit: {limit:.0f} s)", recovery.last, bound=limit)
    experiment.show("others continue", recovery.others, bound=2)
    runs = Run.objects.filter(worker=zombie.id).count()
    again = experiment.under_load(lambda: Run.objects.filter(worker=zombie.id).count() > runs)
    eventually(again, why="the zombie does not work again")


@pytest.mark.short
@pytest.mark.fault("clocks of workers wrong by an hour")
def test_wrong_clocks(experiment, hit, recovery_after):
    """The others check heartbeats, promote due tasks and rescue, and use no clock of their own for it."""
    experiment.worker("--threads", "2", CHAOS_CLOCK="3600")
    told = chaos_tasks.tell_time.enqueue()
    assert told.wait(60).return_value > time.time() + 3500, "the clock is right"
    Task.objects.all().delete()
    experiment.worker("--threads", "2", CHAOS_CLOCK="-3600")
    victim = experiment.worker("--threads", "2")
    due = timezone.now() + timedelta(seconds=4)
    later = experiment.expect(chaos_tasks.work.using(run_after=due).enqueue(0))
    fault = hit(victim)
    experiment.show("the tasks of a killed worker run elsewhere", recovery_after(fault).last, bound=10)
    assert set(Attempt.objects.values_list("worker", flat=True)) <= {victim.id}, "a living worker was taken for dead"
    lateness = (Run.objects.get(task=later[0]).started_at - due).total_seconds()
    assert lateness >= 0, "it ran too early"
    experiment.show("a scheduled task runs when it is due", lateness, bound=5)


@pytest.mark.short
@pytest.mark.fault("a task keeps all memory that its process may have")
def test_a_process_without_memory_begins_nothing(experiment, eventually):
    """What it cannot begin it gives back, and another process runs it. Tasks have one attempt here."""
    experiment.worker("--threads", "2", CHAOS_MEMORY="512")
    [hoarder] = experiment.expect(chaos_tasks.hoard.enqueue())
    eventually(lambda: Run.objects.filter(task=hoarder).exists(), why="the work did not begin")
    once = chaos_tasks.work.using(max_attempts=1)
    experiment.expect(*[once.enqueue(0.05) for _ in range(60)])
    experiment.worker("--threads", "2")
    eventually(experiment.is_over, why="some task is stuck")
    experiment.judge(may_fail={hoarder})


@pytest.mark.short
@pytest.mark.fault("a poison pill: its process dies each time")
def test_a_poison_pill(experiment, eventually):
    """Long tasks run in the same process each time, so each crash ends them, too. They must not fail."""
    experiment.workers(1, "--threads", "4", pglock=QUICK)
    with transaction.atomic():
        pill = experiment.expect(chaos_tasks.take_down.enqueue(after=0.3))
        innocent = experiment.expect(*[chaos_tasks.work.enqueue(1.5) for _ in range(3)])
    eventually(experiment.is_over, why="some task is stuck")
    experiment.judge("it ends FAILED, and nobody else does", may_fail=pill)
    row = Task.objects.get(pk=pill[0])
    assert row.status == "FAILED"
    assert row.rescues == Settings().MAX_RESCUES + 1
    went_down = Task.objects.filter(pk__in=innocent).aggregate(Max("rescues"))["rescues__max"]
    assert went_down >= Settings().MAX_RESCUES, "nobody was beside it"


@pytest.mark.parametrize("count", [pytest.param(5, marks=pytest.mark.short), 50])
@pytest.mark.fault("deploys in a row: SIGTERM or SIGHUP, and a new worker")
def test_deploys_in_a_row(experiment, eventually, count):
    experiment.fault_name = f"{count} deploys in a row: SIGTERM or SIGHUP, and a new worker, under load"
    experiment.workers(2, "--threads", "2")
    for number in range(count):
        experiment.load(8, seconds=0.1)
        old = next(worker for worker in experiment.started if worker.ended_at is None)
        experiment.send_signal(old, signal.SIGHUP if number % 2 else signal.SIGTERM)
        experiment.worker("--threads", "2")
        assert old.wait() == 0
    eventually(experiment.is_over, why="some task is stuck")
    experiment.judge()
    assert not Attempt.objects.exists(), "no task is interrupted"
    assert Worker.objects.count() == 2, "a worker that ends leaves no row"
