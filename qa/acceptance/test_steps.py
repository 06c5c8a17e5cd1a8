"""Tasks with steps, with real processes: races, deploys, and deaths while children are enqueued."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from django_pglock import emit
from django_pglock.models import Attempt, Step, Task
from qa.processes import children_of
from tests.sample import step_tasks
from tests.sample.models import Effect

pytestmark = [pytest.mark.acceptance, pytest.mark.django_db(transaction=True)]

JOURNEYS, PARTS, RACES = 20, 10, 200


def test_of_an_event_and_the_timeout_at_the_same_moment_one_is_recorded_and_stays(worker_process, eventually):
    """200 tasks, each of which gets its event within some milliseconds of its deadline."""
    worker_process("--threads", "2", "--processes", "2")
    for number in range(RACES):
        step_tasks.race.enqueue(number)
    eventually(lambda: Step.objects.filter(kind="EVENT").count() == RACES, why="they do not begin to wait")
    waits = Step.objects.filter(kind="EVENT").order_by("started_at").values_list("event", "started_at")
    for event, began in list(waits):
        time.sleep(max(0.0, began.timestamp() + step_tasks.RACE + random.uniform(-0.1, 0.1) - time.time()))
        emit(event, "event")
    eventually(lambda: not Task.objects.exclude(status="SUCCESSFUL").exists(), why="a task is left behind")
    seen = Counter(tuple(each) for each in Task.objects.values_list("result", flat=True))
    assert set(seen) <= {("event", "event"), ("timeout", "timeout")}
    ends = Step.objects.filter(kind="EVENT", finished_at__isnull=False)
    assert ends.filter(result="event", failure__isnull=True).count() == seen["event", "event"]
    assert ends.filter(result__isnull=True, failure={}).count() == seen["timeout", "timeout"]


def test_old_code_gives_the_tasks_of_new_code_time_to_come_to_it(worker_process, eventually):
    """The order of a rolling deploy that is rolled back for a while, and then finished."""
    new = worker_process("--threads", "2", **{step_tasks.VERSION: "first second ?go third"})
    for number in range(JOURNEYS):
        step_tasks.deployed.enqueue(number)
    waiting = Step.objects.filter(kind="EVENT", finished_at=None)
    eventually(lambda: waiting.count() == JOURNEYS, why="they do not come to their wait")
    new.end()
    worker_process("--threads", "2", **{step_tasks.VERSION: "second ?go third"})
    for number in range(JOURNEYS):
        emit(f"go:{number}")
    postponed = Step.objects.filter(kind="CHANGED")
    eventually(lambda: postponed.count() == JOURNEYS, why="the old code does not postpone them")
    assert not Task.objects.filter(status="FAILED").exists()
    worker_process("--threads", "2", **{step_tasks.VERSION: "first second ?go third"})

    def have_succeeded():
        Task.objects.all().run_now()
        return not Task.objects.exclude(status="SUCCESSFUL").exists()

    eventually(have_succeeded, why="a task is left behind")
    assert {each.attempts_made for each in Task.objects.all()} == {1}
    assert Counter(Effect.objects.values_list("name", flat=True)) == {
        "first": JOURNEYS,
        "second": JOURNEYS,
        "third": JOURNEYS,
    }


@pytest.mark.parametrize("function", [step_tasks.journey, step_tasks.ajourney], ids=["a function", "a coroutine"])
def test_a_deploy_repeats_no_step_and_spends_no_attempt(worker_process, eventually, function):
    """A process that has to end gives its tasks back before their next steps, long before the end of its grace."""
    results = [function.enqueue(number) for number in range(JOURNEYS)]
    for number in range(JOURNEYS):
        emit(f"go on:{number}")
    for _ in range(3):
        before = Step.objects.count()
        process = worker_process("--threads", "4")
        eventually(lambda seen=before: Step.objects.count() > seen + 8, why="no step is recorded")
        process.send(signal.SIGTERM)
        process.wait()
        assert not Task.objects.filter(status="RUNNING").exists()
    worker_process("--threads", "4")
    eventually(lambda: not Task.objects.exclude(status="SUCCESSFUL").exists(), why="a task is left behind")
    assert Effect.objects.count() == Effect.objects.values("name", "number").distinct().count() == JOURNEYS * PARTS
    assert {Task.objects.get(pk=each.id).attempts_made for each in results} == {1}


FAMILY = 40


@pytest.mark.parametrize("moment", ["before the last statement", "before the commit", "after the commit"])
def test_a_worker_that_is_killed_while_it_enqueues_children_enqueues_all_or_none(worker_process, eventually, moment):
    """The children run on two workers, one of which has just lost a process."""
    for _ in range(2):
        worker_process("--threads", "2")
    result = step_tasks.large_family.enqueue(FAMILY, moment, signal.SIGKILL)
    eventually(lambda: not Task.objects.exclude(status="SUCCESSFUL").exists(), why="a task is left behind")
    result.refresh()
    assert result.return_value == list(range(FAMILY)), "the results are in order"
    assert Task.objects.count() == 1 + FAMILY
    assert set(Effect.objects.values_list("number", flat=True)) == set(range(FAMILY))
    assert Attempt.objects.filter(task=result.id, outcome="LOST").count() == (0 if moment == "after the commit" else 1)


def test_a_frozen_worker_that_wakes_after_its_rescue_enqueues_no_children(worker_process, eventually):
    frozen = worker_process("--threads", "2")
    result = step_tasks.large_family.enqueue(FAMILY, "before the last statement", signal.SIGSTOP)
    eventually(lambda: state_of(frozen.process.pid) == "T", why="the worker is not frozen")
    worker_process("--threads", "2")
    eventually(lambda: not Task.objects.exclude(status="SUCCESSFUL").exists(), why="a task is left behind")
    [starter] = children_of(frozen.process.pid)
    [child] = children_of(starter)
    os.kill(child, signal.SIGCONT)
    # The others are woken later: they would kill the child, because it was frozen.
    frozen.wait_for("was lost")
    for pid in (starter, frozen.process.pid):
        os.kill(pid, signal.SIGCONT)
    assert Task.objects.count() == 1 + FAMILY
    assert Step.objects.get().result["children"] == sorted(
        Task.objects.exclude(pk=result.id).values_list("pk", flat=True)
    )
    assert Effect.objects.count() == FAMILY


def state_of(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_deploy_while_a_task_waits_for_its_children_spends_no_attempt(worker_process, eventually):
    """The task is a row, and its children are other rows."""
    result = step_tasks.large_family.enqueue(20 * FAMILY)
    process = worker_process("--threads", "1")
    for _ in range(3):
        before = Effect.objects.count()
        eventually(lambda seen=before: Effect.objects.count() > seen, why="no child has run")
        process.send(signal.SIGTERM)
        process.wait()
        assert not Task.objects.filter(status="RUNNING").exists()
        assert Task.objects.get(pk=result.id).status in ("BLOCKED", "READY", "SUCCESSFUL")
        process = worker_process("--threads", "1")
    eventually(lambda: not Task.objects.exclude(status="SUCCESSFUL").exists(), why="a task is left behind")
    assert Effect.objects.count() == 20 * FAMILY, "each child has run once"
    assert {each.attempts_made for each in Task.objects.all()} == {1}


def test_a_draining_worker_runs_the_children_and_the_task_that_waits_for_them(worker_process):
    result = step_tasks.large_family.enqueue(FAMILY)
    assert worker_process("--threads", "2", "--drain").wait() == 0
    result.refresh()
    assert result.return_value == list(range(FAMILY))
