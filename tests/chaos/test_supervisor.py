"""What happens to a supervisor and to its processes."""

from __future__ import annotations

import math
import os
import signal
import time
from uuid import uuid4

import pytest

from django_pglock.models import Worker
from tests.chaos.stage import Blow

pytestmark = pytest.mark.short


@pytest.fixture
def supervisor(stage, eventually):
    """Start a supervisor with two processes; return it, and the workers that they are."""
    process = stage.start("--processes", "2", "--threads", "2")
    # It is no worker itself.
    process.id = uuid4()
    eventually(lambda: process.output.count("is ready") == 2, why="the processes did not start")
    return process, list(Worker.objects.order_by("pid"))


@pytest.mark.fault("SIGKILL of a supervisor's process")
def test_a_killed_process_of_a_supervisor(stage, supervisor, eventually):
    _, [victim, other] = supervisor
    begun = stage.under_load(lambda: stage.running(20) and stage.hands(victim.pk), seconds=0.5)
    eventually(begun, why="the work did not begin")
    os.kill(victim.pid, signal.SIGKILL)
    at = time.time()
    stage.out_of_reach(victim.pk, at, math.inf)
    blow = Blow(victim.pk, at, stage.hands(victim.pk))
    eventually(lambda: Worker.objects.exclude(pk__in=[victim.pk, other.pk]).exists(), why="not replaced")
    stage.show("it is replaced", time.time() - at, bound=10)
    eventually(stage.is_over, why="some task is stuck")
    recovery = stage.judge().recovery(blow.hands, blow.victim, blow.at)
    stage.show("its tasks run elsewhere", recovery.last, bound=10)
    stage.show("others continue", recovery.others, bound=2)


@pytest.mark.fault("SIGKILL of a supervisor")
def test_a_killed_supervisor(stage, supervisor, eventually):
    process, workers = supervisor
    busy = stage.under_load(lambda: all(stage.hands(each.pk) for each in workers), seconds=0.5)
    eventually(busy, why="the work did not begin")
    began = time.time()
    process.process.kill()
    eventually(lambda: not Worker.objects.exists(), why="its processes have outlived it")
    stage.show("its processes finish what they run, and end", time.time() - began, bound=10)
    assert not stage.is_over(), "nothing was left to do"
    stage.worker("--threads", "4")
    eventually(stage.is_over, why="some task is stuck")
    stage.judge()
