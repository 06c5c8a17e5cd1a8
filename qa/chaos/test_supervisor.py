"""Faults of a supervisor and of its processes."""

from __future__ import annotations

import math
import os
import signal
import time
from uuid import uuid4

import pytest
from django.db import connection

from django_pglock.conf import Settings
from django_pglock.models import Attempt, Worker
from qa.chaos.experiment import Fault

CUT = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND application_name = 'lockworker shared heartbeat'
"""


#: Heartbeats whose limit a test can wait for.
QUICK = {"HEARTBEAT_INTERVAL": 0.9}


@pytest.fixture
def supervised(experiment, eventually):
    """Start a supervisor with two processes; return it, and the workers that they are."""

    def start(**pglock):
        process = experiment.start("--processes", "2", "--threads", "2", pglock=pglock)
        # The supervisor is no worker itself.
        process.id = uuid4()
        eventually(lambda: process.output.count("is ready") == 2, why="the processes did not start")
        return process, list(Worker.objects.order_by("pid"))

    return start


@pytest.fixture
def supervisor(supervised):
    """Start a supervisor with all settings at their defaults."""
    return supervised()


@pytest.mark.fault("SIGKILL of a supervisor's process")
def test_a_killed_process_of_a_supervisor(experiment, supervisor, eventually):
    _, [victim, other] = supervisor
    begun = experiment.under_load(lambda: experiment.running(20) and experiment.in_flight(victim.pk), seconds=0.5)
    eventually(begun, why="the work did not begin")
    in_flight = experiment.stop_at_work(victim.pid, victim.pk)
    assert in_flight, "the victim had no task in flight"
    fault = Fault(victim.pk, time.time(), in_flight)
    os.kill(victim.pid, signal.SIGKILL)
    experiment.out_of_reach(victim.pk, fault.at, math.inf)
    eventually(lambda: Worker.objects.exclude(pk__in=[victim.pk, other.pk]).exists(), why="not replaced")
    experiment.show("it is replaced", time.time() - fault.at, bound=10)
    eventually(experiment.is_over, why="some task is stuck")
    recovery = experiment.judge().recovery(fault.in_flight, fault.victim, fault.at)
    experiment.show("its tasks run elsewhere", recovery.last, bound=10)
    experiment.show("others continue", recovery.others, bound=2)


@pytest.mark.fault("SIGKILL of a supervisor")
def test_a_killed_supervisor(experiment, supervisor, eventually):
    process, workers = supervisor
    busy = experiment.under_load(lambda: all(experiment.in_flight(each.pk) for each in workers), seconds=0.5)
    eventually(busy, why="the work did not begin")
    began = time.time()
    process.process.kill()
    eventually(lambda: not Worker.objects.exists(), why="its processes have outlived it")
    experiment.show("its processes finish what they run, and end", time.time() - began, bound=10)
    assert not experiment.is_over(), "nothing was left to do"
    experiment.worker("--threads", "4")
    eventually(experiment.is_over, why="some task is stuck")
    experiment.judge()


@pytest.mark.fault("SIGSTOP of a supervisor for longer than a hard limit of 9 s")
def test_a_frozen_supervisor(experiment, supervised, eventually):
    """Its processes send heartbeats themselves meanwhile, so no other worker takes their tasks."""
    process, workers = supervised(**QUICK)
    experiment.worker("--threads", "2", pglock=QUICK)
    busy = experiment.under_load(lambda: all(experiment.in_flight(each.pk) for each in workers), seconds=0.5)
    eventually(busy, why="the work did not begin")
    os.kill(process.process.pid, signal.SIGSTOP)
    until = time.monotonic() + 1.5 * Settings(**QUICK).HEARTBEAT_LIMIT
    try:
        eventually(experiment.under_load(lambda: time.monotonic() > until, seconds=0.5))
    finally:
        os.kill(process.process.pid, signal.SIGCONT)
    eventually(experiment.is_over, why="some task is stuck")
    experiment.judge()
    assert not Attempt.objects.filter(outcome="LOST").exists(), "a task was taken from a living worker"


@pytest.mark.fault("the session is cut in which a supervisor beats for its processes")
def test_the_shared_session_is_cut(experiment, supervisor, eventually):
    _, workers = supervisor
    experiment.worker("--threads", "2")
    busy = experiment.under_load(lambda: all(experiment.in_flight(each.pk) for each in workers), seconds=0.5)
    eventually(busy, why="the work did not begin")
    cuts = 0
    until = time.monotonic() + 10

    def cut():
        nonlocal cuts
        with connection.cursor() as cursor:
            cursor.execute(CUT)
            cuts += cursor.rowcount
        time.sleep(0.5)
        return time.monotonic() > until

    eventually(experiment.under_load(cut, seconds=0.5))
    assert cuts > 3
    eventually(experiment.is_over, why="some task is stuck")
    experiment.judge()
    assert not Attempt.objects.filter(outcome="LOST").exists(), "a task was taken from a living worker"
