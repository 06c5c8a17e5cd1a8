"""The page of one task: why the task does not run, and where its key and its schedule lead."""

from __future__ import annotations

import pytest

from django_pglock.models import Queue
from tests.db.admin.visits import make, page_of, person, start_worker, url

pytestmark = pytest.mark.django_db


def test_the_page_says_why_no_worker_runs_the_task(client):
    start_worker(queues=[])
    person(client, "view_task")
    Queue.objects.pause("re&ports")
    reason = "No worker runs this task, because the queue re&amp;ports is paused. Resume the queue."
    assert f'<p class="errornote">{reason}</p>' in page_of(client, make(queue="re&ports"))


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
