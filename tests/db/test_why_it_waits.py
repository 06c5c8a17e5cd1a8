"""The reason why a task waits, as ``locktasks show`` prints it."""

from __future__ import annotations

import json

import pytest
from django.db import connections
from django.db.models.functions import Now

from django_pglock import enqueue_many
from django_pglock.models import Queue, Task
from django_pglock.store.release import release
from tests.db.management.commands.test_locktasks import locktasks
from tests.db.store.test_marking import Replica
from tests.db.store.test_why_unfinished import ECHO, enter
from tests.sample import keyed_tasks as keyed
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)


def why(result):
    text = locktasks("show", result.id)
    said = json.loads(locktasks("show", result.id, "--json"))["why_it_waits"]
    assert (f"{'why_it_waits:':20} {said}" in text.splitlines()) is (said is not None)
    return said


def test_show_says_why_a_ready_task_is_not_run():
    result = tasks.echo.enqueue(1)
    assert why(result) == "No worker is running. Start one: python manage.py runlockworker"
    enter("other.path")
    assert why(result).startswith("No worker knows this task. Do the workers import its module")
    enter(ECHO, queues=["mail"])
    assert why(result).startswith("No worker that knows this task serves the queue default.")
    enter(ECHO)
    assert why(result) is None
    Queue.objects.pause("default")
    assert why(result).startswith("No worker runs this task, because the queue default is paused.")
    Task.objects.update(status="SUCCESSFUL", finished_at=Now())
    assert why(result) is None


def test_show_says_for_what_a_blocked_task_waits():
    first, second = (keyed.step.enqueue("7") for _ in range(2))
    child = tasks.nothing.using(after=[first, second]).enqueue()
    assert why(second).endswith(f"which is held by #{first.id}.")
    assert why(child) == f"This task waits for #{first.id}, #{second.id} to finish."
    Task.objects.filter(pk=first.id).update(status="SCHEDULED", run_after=Now(), started_at=Now())
    assert why(second).endswith(f"which is held by #{first.id}."), "it will be tried again"
    Task.objects.filter(pk=first.id).update(started_at=None)
    assert "which is held by no task at the moment" in why(second), "it has never begun"
    Task.objects.filter(pk=first.id).update(status="SUCCESSFUL", finished_at=Now())
    assert "which is held by no task at the moment" in why(second)


def test_show_says_how_many_of_the_tasks_before_it_have_not_ended():
    parts = enqueue_many(tasks.nothing, [{} for _ in range(8)])
    final = tasks.nothing.using(after_ended=parts).enqueue()
    Task.objects.filter(pk__in=parts[:2]).update(status="SUCCESSFUL", finished_at=Now())
    release("default", map(int, parts[:2]))
    named = ", ".join(f"#{each}" for each in parts[2:7])
    assert why(final) == f"This task waits for 6 of 8 tasks to finish: {named} …"


def test_show_says_that_a_task_waits_for_a_token_of_its_rate():
    """The tasks that have got a token hold nothing: if they end, there is no token sooner."""
    first, _second, third = (keyed.trickle.enqueue("acme") for _ in range(3))
    said = "This task waits for a token of its rate. The key of the rate is tenant:acme."
    assert why(third) == said
    Task.objects.filter(pk=first.id).update(status="SUCCESSFUL", finished_at=Now())
    assert why(third) == said


def test_show_says_that_a_task_with_a_lock_key_waits_for_a_token():
    limited = tasks.nothing.using(lock="order:7", rate="1/h")
    first, second = limited.enqueue(), limited.enqueue()
    assert why(second) == f"This task waits for its lock key order:7, which is held by #{first.id}."
    Task.objects.filter(pk=first.id).update(status="SUCCESSFUL", finished_at=Now())
    assert why(second) == "This task waits for a token of its rate. The key of the rate is its lock key order:7."


def test_show_says_for_which_call_of_its_group_a_task_waits():
    first, second = (keyed.digest.enqueue(user=5, text="news") for _ in range(2))
    said = f"This task waits for a call of its group mail:5. Before it, or in the same call: #{first.id}."
    assert why(second) == said


def test_show_reads_only_the_database_of_the_tasks(settings, monkeypatch):
    """A router may send other reads to a replica, which may be behind. This one cannot be reached."""
    unreachable = {**connections.settings["default"], "HOST": "127.0.0.1", "PORT": "1"}
    monkeypatch.setitem(connections.settings, "replica", unreachable)
    first = tasks.nothing.enqueue()
    child = tasks.nothing.using(after=[first]).enqueue()
    settings.DATABASE_ROUTERS = [f"{Replica.__module__}.{Replica.__qualname__}"]
    assert why(child) == f"This task waits for #{first.id} to finish."
