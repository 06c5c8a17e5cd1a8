"""The page of one task: why the task does not run."""

from __future__ import annotations

import pytest
from django.db import connection
from django.db.models.functions import Now
from django.test.utils import CaptureQueriesContext

from django_pglock.models import Queue, Task
from tests.db.admin.visits import make, page_of, person, start_worker, url
from tests.sample import keyed_tasks as keyed
from tests.sample import tasks

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize(
    ("paths", "status", "text"),
    [
        (None, "READY", "No worker is running. Start one: python manage.py runlockworker"),
        ([[], ["shop.other"]], "READY", "No worker knows this task. Do the workers import its module"),
        ([["shop.other"], ["shop.other", "tests.sample.tasks.nothing"]], "READY", None),
        (None, "SUCCESSFUL", None),
    ],
)
def test_the_task_page_says_that_no_worker_knows_the_function(client, paths, status, text):
    for known in paths or ():
        start_worker(queues=[], task_paths=known)
    person(client, "view_task")
    with CaptureQueriesContext(connection) as queries:
        page = page_of(client, make(status))
    assert ("No worker" in page) is (text is not None)
    assert (text or "") in page
    assert len([each for each in queries if "task_paths" in each["sql"]]) == (status == "READY")


@pytest.mark.parametrize("status", ["READY", "RUNNING"])
def test_a_ready_task_names_its_queue_if_that_is_paused_or_if_no_worker_serves_it(client, status):
    start_worker()
    person(client, "view_task")
    task = make(status, queue="re&ports")
    unserved = "No worker that knows this task serves the queue re&amp;ports. Start a worker that serves this queue."
    assert (unserved in page_of(client, task)) is (status == "READY")
    start_worker(queues=["re*"])
    assert "No worker" not in page_of(client, task)
    Queue.objects.pause("re&ports")
    paused = "No worker runs this task, because the queue re&amp;ports is paused. Resume the queue."
    assert (paused in page_of(client, task)) is (status == "READY")


@pytest.mark.django_db(transaction=True)
def test_a_blocked_task_says_what_it_waits_for(client):
    first, second = (keyed.step.enqueue("7") for _ in range(2))
    child = tasks.nothing.using(after=[first, second]).enqueue()
    person(client, "view_task")

    def page(result):
        return page_of(client, Task.objects.get(pk=result.id))

    key = Task.objects.get(pk=second.id).lock_key
    assert f"This task waits for its lock key {key}, which is held by #{first.id}." in page(second)
    assert "This task waits" not in page(first)
    assert f"This task waits for #{first.id}, #{second.id} to finish." in page(child)
    Task.objects.filter(pk=first.id).update(status="SCHEDULED", run_after=Now(), started_at=Now())
    assert f"which is held by #{first.id}." in page(second), "it will be tried again"
    Task.objects.filter(pk=first.id).update(started_at=None)
    assert "which is held by no task at the moment" in page(second), "it has never begun"
    Task.objects.filter(pk=first.id).update(status="SUCCESSFUL", finished_at=Now())
    assert "which is held by no task at the moment" in page(second)


def test_a_task_that_has_got_a_token_of_its_rate_is_not_shown_as_a_holder(client):
    person(client, "view_task")
    make("READY", lock_key="%rate acme")
    waiting = make("BLOCKED", lock_key="%rate acme", waits_for=0)
    page = page_of(client, waiting)
    assert "This task waits for a token of its rate. The key of the rate is acme." in page
    assert "held by" not in page


def test_a_lock_key_leads_to_its_tasks(client):
    person(client, "view_task")
    waiting = make("BLOCKED", lock_key="order:7", waits_for=0)
    assert '<a href="../../?key=order%3A7">order:7</a>' in page_of(client, waiting)


def test_a_redacted_lock_key_is_no_link(client, settings):
    person(client, "view_task")
    row = make("READY", lock_key="order:7")
    settings.DJANGO_PGLOCK = {**settings.DJANGO_PGLOCK, "REDACT": lambda path, name, value: "hidden"}
    page = page_of(client, row)
    assert "order:7" not in page
    assert "order%3A7" not in page


def test_a_task_of_a_schedule_leads_to_the_schedule(client):
    person(client, "view_task", "view_schedule")
    address = url("schedule", "change", "tests.sample.tasks.nothing")
    tick = "2026-01-01T10:00:00+00:00"
    assert f'<a href="{address}">{tick}</a>' in page_of(client, make(meta={"schedule": tick}))
    assert address not in page_of(client, make())
    assert "of a group" in page_of(client, make(group_key="of a group"))
