"""The tables of the overview: queues, and workers with their tasks."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
from django.db.models.functions import Now
from django.urls import reverse

from django_pglock.admin import overview_facts, overview_tables
from django_pglock.admin.overview_tables import queue_table, worker_table
from django_pglock.models import Queue
from tests.db.admin.visits import make, person, start_worker

pytestmark = pytest.mark.django_db

PAGE = reverse("admin:django_pglock_overview_changelist")


def test_a_user_with_the_right_to_view_workers_sees_no_tasks(client):
    make("RUNNING", worker=start_worker())
    person(client, "view_worker")
    assert "nothing #" not in client.get(PAGE).content.decode()
    person(client, "view_worker", "view_task")
    assert "nothing #" in client.get(PAGE).content.decode()


def test_a_queue_shows_its_depth_and_its_failures_with_links(client, monkeypatch):
    monkeypatch.setattr("django_pglock.store.count.MOST_COUNTED", 4)
    worker = start_worker()
    for status, count in (("READY", 4), ("RUNNING", 2), ("FAILED", 3)):
        for _ in range(count):
            make(status, queue="mail", run_after=None, worker=worker)
    Queue.objects.pause("quiet")
    person(client, "view_task", "view_queue")
    table = client.get(PAGE).context["queues"]
    rows = {row.name: (str(row.ready), row.running, row.failed, row.paused_at is not None) for row in table.rows}
    assert rows == {"mail": ("4+", 2, 3, False), "quiet": ("0", 0, 0, True)}
    [mail, _] = table.rows
    assert mail.ready_url == "/admin/django_pglock/task/?status__exact=READY&queue=mail"
    assert client.get(mail.failed_url).status_code == 200


def test_a_worker_shows_what_it_runs_and_since_when(client):
    worker = start_worker()
    start_worker("idle")
    tasks = [make("RUNNING", worker=worker) for _ in range(5)]
    person(client, "view_task", "view_worker")
    table = client.get(PAGE).context["workers"]
    [busy, idle] = table.rows
    assert (busy.name, busy.queues, busy.more) == ("worker-1", "mail", 2)
    text, url = busy.tasks[0]
    assert re.fullmatch(rf"nothing #{tasks[0].pk} for \d+ s", text)
    assert client.get(url).status_code == 200
    assert (idle.name, idle.tasks) == ("idle", [])
    assert (table.count, table.running) == (2, 5)


def test_long_tables_of_the_overview_are_cut_with_the_number_of_missing_rows(client, monkeypatch):
    monkeypatch.setattr("django_pglock.admin.overview_tables.MOST_SHOWN", 2)
    for number in range(5):
        start_worker(f"w{number}")
        make(queue=f"q{number}")
    person(client, "view_task", "view_worker")
    page = client.get(PAGE).content.decode()
    assert "3 more queues are not shown." in page
    assert "3 more workers are not shown." in page


def test_the_queues_that_need_attention_come_first(facts, settings):
    settings.TASKS = {"default": {**settings.TASKS["default"], "QUEUES": ["configured", "busy", "old"]}}
    for name, hours in (("young", 1), ("old", 2)):
        make(queue=name, enqueued_at=Now() - timedelta(hours=hours), run_after=None)
    Queue.objects.pause("paused")
    make("RUNNING", queue="busy")
    assert [row.name for row in queue_table(facts).rows] == ["old", "young", "paused", "busy", "configured"]


def test_numbers_that_were_counted_up_to_a_limit_have_a_plus_sign(facts, monkeypatch):
    for module in (overview_facts, overview_tables):
        monkeypatch.setattr(module, "MOST_RUNNING", 2)
        monkeypatch.setattr(module, "MOST_WORKERS", 2)
    for name in ("a", "b", "c"):
        make("RUNNING", worker=start_worker(name))
    table = worker_table(facts)
    assert (str(table.count), str(table.running), len(table.rows)) == ("2+", "2+", 2)
