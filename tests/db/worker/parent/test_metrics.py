"""The metrics of a worker: what they tell, and in which format."""

from __future__ import annotations

import math
import threading
from datetime import timedelta

import pytest
from django.db import OperationalError

from django_pglock.models import Number, Queue, Task
from django_pglock.worker.parent import probes as module
from tests.conftest import NEVER
from tests.db.worker.parent.asking import ask, metrics
from tests.db.worker.parent.conftest import sessions
from tests.sample import running_tasks, step_tasks, tasks
from tests.sample.running_tasks import FOREVER

pytestmark = pytest.mark.django_db(transaction=True)


def test_what_the_children_do_now_is_told(probed, eventually):
    worker = probed()
    running_tasks.wait_for_note.enqueue("go on")
    eventually(lambda: (found := metrics(worker))["tasks_in_flight"] == found["tasks_running"] == 1)
    running_tasks.note("go on")
    found = eventually(lambda: not (found := metrics(worker))["tasks_in_flight"] and found)
    assert (found["processes"], found["threads"], found["worker_ready"]) == (1, 2, 1)
    assert (found["tasks_running"], found["outcomes_waiting"]) == (0, 0)
    assert 0 <= found["heartbeat_age_seconds"] < NEVER


def write_numbers(worker, eventually):
    """Let the settler write now what it would write within a minute."""
    worker.settler.history._write_at = 0.0
    worker.settler.wake()
    eventually(lambda: worker.settler.history.due_in() == math.inf)


def test_attempts_are_counted_by_function_with_their_times(probed, eventually):
    worker = probed()
    tasks.nothing.using(queue_name="mail").enqueue()
    tasks.fail_twice.enqueue("a")
    eventually(lambda: not Task.objects.filter(finished_at=None).exists())
    path = "function=tests.sample.tasks.fail_twice"
    name = f"attempts_total queue=default,{path}"
    write_numbers(worker, eventually)
    found = eventually(lambda: (found := metrics(worker)).get(f"{name},outcome=succeeded") and found)
    assert (found[f"{name},outcome=retried"], found[f"{name},outcome=failed"]) == (2, 0)
    assert found["attempts_total queue=mail,function=tests.sample.tasks.nothing,outcome=succeeded"] == 1
    times = f"task_run_seconds_bucket queue=default,{path},le="
    buckets = [found[key] for key in found if key.startswith(times)]
    assert buckets == sorted(buckets)
    assert [key.removeprefix(times) for key in found if key.startswith(times)][:3] == ["0.001", "0.004", "0.016"]
    assert found[f"{times}+Inf"] == found[f"task_run_seconds_count queue=default,{path}"] == 3
    assert 0 < found[f"task_run_seconds_sum queue=default,{path}"] < NEVER
    assert found[f"task_wait_seconds_count queue=default,{path}"] == 1


def test_the_queues_of_the_database_are_counted(probed, eventually, monkeypatch):
    worker = probed(queues=["other"])
    for _ in range(3):
        tasks.nothing.using(queue_name='an "odd\\one" 9%s').enqueue()
    Queue.objects.pause("mail")
    Number.objects.filter(kind="counted").delete()

    odd = 'queue=an \\"odd\\\\one\\" 9%s'
    found = metrics(worker)
    assert found[f"tasks_ready {odd}"] == 3
    assert 0 < found[f"oldest_ready_task_age_seconds {odd}"] < NEVER
    statuses = ("ready", "blocked", "scheduled", "running", "failed")
    assert [found[f"tasks {odd},status={status}"] for status in statuses] == [3, 0, 0, 0, 0]
    assert (found[f"queue_paused {odd}"], found["queue_paused queue=mail"]) == (0, 1)
    eventually(lambda: not sessions("metrics"), why="a session stays")


def test_steps_are_counted_by_function_and_suspended_tasks_by_kind(probed, eventually, monkeypatch):
    monkeypatch.setattr(step_tasks, "CHILDREN", [tasks.nothing.using(run_after=timedelta(days=1)).call_of()])
    worker = probed()
    for each in (step_tasks.order.enqueue(7), step_tasks.aorder.enqueue(7), step_tasks.family.enqueue()):
        eventually(lambda each=each: Task.objects.suspended().filter(pk=each.id).exists())
    late = step_tasks.approval.enqueue(0.1)
    eventually(lambda: Task.objects.get(pk=late.id).status == "SUCCESSFUL")
    Number.objects.filter(kind="counted").delete()
    path = "queue=default,function=tests.sample.step_tasks"
    write_numbers(worker, eventually)
    found = eventually(lambda: (found := metrics(worker)).get(f"waits_timed_out_total {path}.approval") and found)
    assert found[f"waits_timed_out_total {path}.approval"] == 1
    assert found[f"steps_recorded_total {path}.order"] == 2
    assert f"steps_recorded_total {path}.family" not in found, "functions without are left out"
    assert [found[f"tasks_suspended queue=default,kind={kind}"] for kind in ("sleep", "event", "children")] == [1, 1, 1]


def test_without_a_database_the_metrics_of_the_worker_are_still_there(probed, monkeypatch, caplog):
    worker = probed()
    monkeypatch.setattr(module, "depths", refuse)
    found = metrics(worker)
    assert found["processes"] == 1
    assert not [name for name in found if name.startswith("tasks_ready")]
    assert "The metrics of tasks cannot be read: no server" in caplog.text


def refuse(using):
    raise OperationalError("no server")


def test_an_answer_that_waits_for_the_database_keeps_no_other_waiting(probed, monkeypatch):
    begun, go_on = threading.Event(), threading.Event()
    worker = probed()
    monkeypatch.setattr(module, "depths", lambda using: begun.set() or (go_on.wait(FOREVER) and []))
    first = threading.Thread(target=ask, args=(worker, "/metrics"))
    first.start()
    try:
        assert begun.wait(NEVER)
        assert metrics(worker)["processes"] == 1
        assert ask(worker, "/livez")[0] == 200
    finally:
        go_on.set()
        first.join(NEVER)
