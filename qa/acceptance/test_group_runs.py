"""``Group(concurrency=n)``: n runs of one group key at a time, in several processes, of which one is killed."""

from __future__ import annotations

import os
import signal

import pytest

from django_pglock import enqueue_many
from django_pglock.models import Task
from tests.db.store.test_group_runs import RUNS, runs_at_once
from tests.sample import grouped_tasks as grouped
from tests.sample.models import Effect

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.acceptance]


def test_processes_run_as_many_as_may_run_and_never_more_also_if_one_is_killed(worker_process, eventually):
    for _ in range(2):
        worker_process("--threads", "4", "--processes", "2")
    enqueue_many(grouped.side_by_side, [{"key": 1}] * 20)
    begun = Effect.objects.filter(name="begin")
    eventually(lambda: begun.count() == RUNS)
    killed = begun.latest("id").pid
    os.kill(killed, signal.SIGKILL)
    # Its runs begin again elsewhere. They have written a begin, and never an end.
    eventually(lambda: begun.exclude(pid=killed).count() == RUNS, why="the killed runs did not begin again")
    begun.filter(pid=killed).delete()
    assert Task.objects.filter(status="RUNNING", concurrency__gt=0).count() == RUNS
    Effect.objects.create(name="go on")
    eventually(lambda: Task.objects.filter(status="SUCCESSFUL").count() == 20)
    assert runs_at_once() == RUNS
