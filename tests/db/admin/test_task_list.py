"""The list of tasks: filters, searches, and links to older tasks."""

from __future__ import annotations

from uuid import uuid4

import pytest

from django_pglock.admin import pages
from django_pglock.store.liveness import beat
from tests.db.admin.visits import LIST, make, person

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize(
    "query",
    ["?status__exact=READY", "?queue=mail", "?task_path=x", "?attention=stuck", "?q=nothing", "?q=1",
     "?q=%00", "?queue=%00", "?task_path=%00", "?status__exact=%00", "?status__exact=NO", "?attention=x",
     "?p=abc", "?p=-1", "?id__lt=abc", "?id__lt=" + "9" * 30, "?_facets=True", "?all=",
     "?o=99", "?q=" + "9" * 30, "?q=%27%3B--", "?o=1", "?p=999", "?id__lt=5"],
)  # fmt: skip
def test_filters_and_searches_answer_whatever_is_typed(client, query):
    person(client, "view_task")
    make()
    assert client.get(LIST + query, follow=True).status_code == 200


def test_search_finds_by_id_and_by_function(client):
    person(client, "view_task")
    mine, other = make(), make(task_path="tests.sample.tasks.echo")
    for term in (str(mine.pk), "tests.sample.tasks.nothing", "nothing"):
        found = client.get(LIST, {"q": term}).content.decode()
        assert f"#{mine.pk}<" in found
        assert f"#{other.pk}<" not in found


def test_the_list_is_counted_only_so_far_and_older_ones_are_a_key_away(client, monkeypatch):
    monkeypatch.setattr(pages, "MOST_COUNTED", 7)
    monkeypatch.setattr("django_pglock.admin.tasks.TaskAdmin.list_per_page", 5)
    person(client, "view_task")
    rows = [make() for _ in range(12)]
    page = client.get(LIST)
    assert page.context["cl"].result_count == 7
    assert f"id__lt={rows[7].pk}" in page.content.decode()
    older = client.get(LIST + f"?id__lt={rows[7].pk}").content.decode()
    assert f"#{rows[6].pk}<" in older
    assert f"#{rows[7].pk}<" not in older


def test_older_ones_are_offered_only_where_there_are_any(client, monkeypatch):
    monkeypatch.setattr("django_pglock.admin.tasks.TaskAdmin.list_per_page", 3)
    person(client, "view_task")
    rows = [make() for _ in range(5)]

    def older(**query):
        return client.get(LIST, query).context["cl"].older_query

    assert f"id__lt={rows[2].pk}" in older()
    assert older(p=2) == ""
    assert older(o="-0") == "", "the oldest come first here"


def test_ready_tasks_that_no_worker_can_run_are_told_of(client):
    person(client, "view_task")
    warning = "no worker is alive that could run them. Start one: manage.py runlockworker"
    assert warning not in client.get(LIST).content.decode(), "there is no task"
    make("SCHEDULED")
    assert warning not in client.get(LIST).content.decode(), "no task is ready"
    make("READY")
    assert warning in client.get(LIST).content.decode()
    beat("default", uuid4(), name="w", hostname="h", pid=1, queues=[], threads=1, is_stopping=False)
    assert warning not in client.get(LIST).content.decode()
