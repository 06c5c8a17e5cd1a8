"""The overview: its permissions and sections, and the links to it."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
from django.apps import apps
from django.contrib import admin
from django.contrib.auth.models import User
from django.db import connection
from django.db.models.functions import Now
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from django_pglock.admin import overview_attention
from django_pglock.admin.failures import FailureGroup
from django_pglock.admin.overview import VIEWED, Overview, queue_table
from django_pglock.models import Queue
from django_pglock.store.numbers import count_depths
from tests.db.admin.test_security import refuse_activity
from tests.db.admin.visits import make, person, start_worker, url

pytestmark = pytest.mark.django_db

PAGE = url("overview")


def sections(response):
    return re.findall(r'<h2 id="pglock-(\w+)"', response.content.decode())


def test_the_overview_asks_for_permission(client):
    assert client.get(PAGE).status_code == 302
    person(client)
    assert client.get(PAGE).status_code == 403
    person(client, "view_task")
    assert client.get(PAGE).status_code == 200
    assert client.post(PAGE).status_code == 405


@pytest.mark.parametrize("model", ["overview", "failuregroup"])
def test_a_page_without_a_table_names_its_app(admin_client, model):
    """Themes such as django-unfold show the name of ``opts.app_config``, as our own breadcrumbs do."""
    page = admin_client.get(url(model))
    assert page.context["opts"].app_config is apps.get_app_config("django_pglock")
    assert page.content.decode().count(">Background tasks and locks</a>") >= 2, (
        "in the navigation and in the breadcrumbs"
    )


@pytest.mark.parametrize("name", ["index", "app_list"])
def test_the_indexes_lead_to_the_overview(client, name):
    address = reverse(f"admin:{name}", args=["django_pglock"] if name == "app_list" else [])
    person(client, "view_worker")
    assert f'href="{PAGE}"' in client.get(address).content.decode()
    User.objects.filter(is_staff=True).delete()
    person(client, "view_user")
    page = client.get(reverse("admin:index")).content.decode()
    assert "/auth/user/" in page
    assert PAGE not in page


def test_each_view_permission_allows_the_overview(client):
    for model in VIEWED:
        person(client, f"view_{model._meta.model_name}")
        assert client.get(PAGE).status_code == 200, model
    ours = {model for model in admin.site._registry if model._meta.app_label == "django_pglock"}
    # Failures are viewed with the permission to view tasks.
    assert ours == {Overview, FailureGroup, *VIEWED}, "a new page of this package is in the list, too"


@pytest.mark.parametrize(
    ("permissions", "shown"),
    [
        (["view_schedule"], ["attention"]),
        (["view_worker"], ["attention", "workers"]),
        (["view_task"], ["attention", "queues", "history"]),
        (["view_task", "view_worker"], ["attention", "queues", "workers", "history"]),
    ],
)
def test_the_overview_shows_only_sections_that_the_user_may_view(client, permissions, shown):
    Queue.objects.pause("mail")
    person(client, *permissions)
    page = client.get(PAGE)
    assert sections(page) == shown
    assert "has been paused" not in page.content.decode()


def test_a_quiet_system_needs_no_attention(client):
    start_worker()
    person(client, "view_task", "view_worker")
    page = client.get(PAGE).content.decode()
    assert "Nothing needs attention." in page


def test_the_overview_escapes_names(client):
    evil = '<script>alert(1)</script>"onmouseover="z'
    Queue.objects.pause(evil, by=evil, reason=evil)
    make(queue=evil, task_path=evil)
    start_worker(evil)
    person(client, "view_task", "view_worker", "view_queue")
    assert "&lt;script&gt;" in refuse_activity(client.get(PAGE))


# What it reads, and the tables of queues and workers

#: The most statements of the page, with those that log the user in.
MOST_STATEMENTS = 24


def test_the_page_sends_the_same_number_of_statements_however_much_there_is(client):
    def cost():
        with CaptureQueriesContext(connection) as queries:
            assert client.get(PAGE).status_code == 200
        return len(queries)

    person(client, *(f"view_{model._meta.model_name}" for model in VIEWED))
    worker = start_worker()
    count_depths("default")
    first = cost()
    for number in range(5):
        make(queue=f"q{number}")
        make("RUNNING", queue=f"q{number}", worker=worker)
        make("FAILED", queue=f"q{number}")
        Queue.objects.pause(f"q{number}")
    count_depths("default", 0.0)
    assert first <= cost() <= MOST_STATEMENTS


def test_running_tasks_are_read_up_to_a_limit(facts, monkeypatch):
    monkeypatch.setattr(overview_attention, "MOST_RUNNING", 3)
    worker = start_worker()
    for queue in ("mail", "mail", "other", "other"):
        make("RUNNING", queue=queue, worker=worker)
    assert [task.queue for task in facts.running] == ["mail", "mail", "other"]


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
    rows = {row["name"]: (str(row["ready"]), row["running"], row["failed"], row["is_paused"]) for row in table["rows"]}
    assert rows == {"mail": ("4+", 2, 3, False), "quiet": ("0", 0, 0, True)}
    [mail, _] = table["rows"]
    assert mail["ready_url"] == "/admin/django_pglock/task/?status__exact=READY&queue=mail"
    assert client.get(mail["failed_url"]).status_code == 200


def test_a_worker_shows_what_it_runs_and_since_when(client):
    worker = start_worker()
    start_worker("idle")
    tasks = [make("RUNNING", worker=worker) for _ in range(5)]
    person(client, "view_task", "view_worker")
    table = client.get(PAGE).context["workers"]
    [(busy, oldest, more), (idle, nothing, _)] = table["rows"]
    assert (busy.name, more, idle.name, nothing) == ("worker-1", 2, "idle", [])
    task, time = oldest[0]
    assert task == tasks[0]
    assert re.fullmatch(r"\d+ s", time)
    page = client.get(PAGE).content.decode()
    assert f'<a href="{url("task", "change", task.pk)}">nothing #{task.pk} for ' in page
    assert "and 2 more" in page


def test_long_tables_of_the_overview_are_cut_with_the_number_of_missing_rows(client, monkeypatch):
    monkeypatch.setattr("django_pglock.admin.overview.MOST_SHOWN", 2)
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
    assert [row["name"] for row in queue_table(facts)["rows"]] == ["old", "young", "paused", "busy", "configured"]
