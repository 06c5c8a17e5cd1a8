"""The admin pages of archived tasks: one day at a time, found from the list of tasks, and only to be viewed."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.contrib import admin
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from django_pglock.admin import archived_tasks
from django_pglock.models import ArchivedTask
from django_pglock.store.archive_state import archive_state
from tests.db.admin.visits import LIST, person
from tests.db.store.archiving import TWO_HOURS, fail, walk
from tests.db.store.test_prune import make
from tests.sample import tasks

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("own_archive")]

ARCHIVE = reverse("admin:django_pglock_archivedtask_changelist")


def page_of(row):
    return reverse("admin:django_pglock_archivedtask_change", args=[row.pk])


@pytest.fixture
def archived():
    """Two tasks that ended two days ago, and three that ended yesterday, by UTC."""
    noon = timezone.now().replace(hour=12)
    days = [noon - timedelta(days=2)] * 2 + [noon - timedelta(days=1)] * 3
    rows = [
        make(days=3, finished_at=day, queue=f"q{number % 2}", args=[number], attempts=1)
        for number, day in enumerate(days)
    ]
    assert walk() == 5
    return rows


def ids(response):
    return [row.pk for row in response.context["cl"].result_list]


def test_the_list_shows_the_newest_day_and_others_on_request(admin_client, archived):
    before, newest = archive_state("default").days
    with CaptureQueriesContext(connection) as queries:
        response = admin_client.get(ARCHIVE)
    # The session and the user are two more.
    assert len(queries) <= 5, [each["sql"] for each in queries]
    assert ids(response) == [row.pk for row in reversed(archived[2:])]
    assert ids(admin_client.get(ARCHIVE, {"day": before})) == [row.pk for row in reversed(archived[:2])]
    assert f"?day={before}" in response.text
    assert ids(admin_client.get(ARCHIVE, {"day": newest + timedelta(days=1)})) == []


def test_only_the_partition_of_the_day_is_read(admin_client, archived):
    with CaptureQueriesContext(connection) as queries:
        admin_client.get(ARCHIVE)
    listing = [each["sql"] for each in queries if "LIMIT" in each["sql"] and "archivedtask" in each["sql"]]
    with connection.cursor() as cursor:
        for sql in listing:
            cursor.execute(f"EXPLAIN {sql}")
            text = "\n".join(line for (line,) in cursor.fetchall())
            assert text.count("django_pglock_archivedtask_2") >= 1
            assert f"{archive_state('default').days[0]:%Y%m%d}" not in text
    assert listing


@pytest.mark.parametrize("query", [{"q": "9" * 5000}, {"q": "x", "id__lt": "9" * 5000}])
def test_a_number_of_any_length_is_searched(admin_client, query):
    assert admin_client.get(ARCHIVE, query, follow=True).status_code == 200


@pytest.mark.parametrize(("query", "numbers"), [({"queue": "q1"}, [3]), ({"q": "nothing", "queue": "q0"}, [4, 2])])
def test_filters_search_the_newest_tasks_of_the_day(admin_client, archived, query, numbers):
    with CaptureQueriesContext(connection) as queries:
        response = admin_client.get(ARCHIVE, query)
    assert len(queries) <= 5, [each["sql"] for each in queries]
    assert ids(response) == [archived[number].pk for number in numbers]
    assert "Older tasks" not in response.text


def test_a_search_that_stops_says_so_and_has_a_link_to_continue(admin_client, archived, monkeypatch):
    monkeypatch.setattr(archived_tasks, "MOST_SEARCHED", 1)
    response = admin_client.get(ARCHIVE, {"queue": "q0"})
    assert ids(response) == [archived[4].pk]
    assert "Only the newest 1 tasks were searched" in response.text
    response = admin_client.get(ARCHIVE + response.context["cl"].older_query)
    assert ids(response) == []
    response = admin_client.get(ARCHIVE + response.context["cl"].older_query)
    assert ids(response) == [archived[2].pk]


def test_an_id_is_found_on_any_day(admin_client, archived):
    assert ids(admin_client.get(ARCHIVE, {"q": archived[0].pk})) == [archived[0].pk]


@pytest.mark.parametrize("day", ["x", "2026-13-01", "9999-12-31", "0001-01-01"])
def test_a_wrong_day_is_refused(admin_client, archived, day):
    response = admin_client.get(ARCHIVE, {"day": day})
    assert response.status_code in (200, 302)
    if response.status_code == 200:
        assert ids(response) == []


def test_an_empty_archive_has_an_empty_list(admin_client):
    assert ids(admin_client.get(ARCHIVE)) == []


def test_the_page_shows_what_the_page_of_the_task_has_shown(admin_client):
    row = make(
        *("SUCCESSFUL",), days=TWO_HOURS, task_path=tasks.echo.module_path, args=[{"a": "seven"}], attempts=2,
        lock_key="order:7", result="the result", log="a line", meta={"after": [4711], "schedule": "2026-11-23"},
    )  # fmt: skip
    fail(row, 1)
    assert walk() == 1
    text = admin_client.get(page_of(row)).text
    for part in (
        *("This task is in the archive.", "Succeeded", "tests.sample.tasks.echo", "seven", "order:7", "the result"),
        *("a line", "#4711", "Traceback 1", "builtins.ValueError", "2026-11-23"),
    ):
        assert part in text, part


def test_redacted_values_stay_hidden(admin_client, settings):
    settings.DJANGO_PGLOCK = {**settings.DJANGO_PGLOCK, "REDACT": lambda path, name, value: "[redacted]"}
    row = make(
        days=TWO_HOURS, args=["secret"], result="secret", lock_key="secret", unique_key="secret", unique_scope="WAITING"
    )
    assert walk() == 1
    text = admin_client.get(page_of(row)).text
    assert "secret" not in text
    assert "[redacted]" in text


def test_the_page_of_a_moved_task_leads_to_the_archive(admin_client):
    row = make(days=TWO_HOURS)
    page = reverse("admin:django_pglock_task_change", args=[row.pk])
    assert walk() == 1
    response = admin_client.get(page)
    assert (response.status_code, response.url) == (302, page_of(row))
    for other in ("999999", "x", str(2**63), "-1"):
        response = admin_client.get(reverse("admin:django_pglock_task_change", args=[other]))
        assert (response.status_code, response.url) == (302, reverse("admin:index"))


def test_the_list_of_tasks_links_to_the_archive_if_there_is_one(admin_client):
    make(days=TWO_HOURS)
    assert ARCHIVE not in admin_client.get(LIST).text
    walk()
    assert ARCHIVE in admin_client.get(LIST).text, "the list is empty"
    make()
    assert ARCHIVE in admin_client.get(LIST).text
    assert ARCHIVE not in admin_client.get(reverse("admin:index")).text


def test_the_right_to_view_tasks_shows_the_archive_and_no_right_changes_it(client, archived):
    person(client, "view_worker")
    assert client.get(ARCHIVE).status_code == 403
    assert client.get(page_of(archived[0])).status_code == 403
    response = client.get(reverse("admin:django_pglock_task_change", args=[archived[0].pk]))
    assert ARCHIVE not in response.get("Location", "")
    person(client, "view_task", "change_task", "delete_task", "add_task")
    assert client.get(ARCHIVE).status_code == 200
    assert client.get(page_of(archived[0])).status_code == 200
    assert client.get(reverse("admin:django_pglock_archivedtask_delete", args=[archived[0].pk])).status_code == 403
    assert client.post(page_of(archived[0]), {"queue": "x"}).status_code == 403
    assert client.get(reverse("admin:django_pglock_archivedtask_add")).status_code == 403
    assert ArchivedTask.objects.count() == 5


def test_a_project_without_time_zones_has_the_same_days(admin_client, settings):
    settings.USE_TZ = False
    connection.close()
    row = make(days=TWO_HOURS)
    assert walk() == 1
    assert ids(admin_client.get(ARCHIVE)) == [row.pk]
    assert admin_client.get(page_of(row)).status_code == 200
    settings.USE_TZ = True
    connection.close()


def test_an_admin_site_without_the_pages_of_the_archive_finds_no_archived_task(admin_client, archived, monkeypatch):
    url = reverse("admin:django_pglock_task_change", args=[archived[0].pk])
    assert admin_client.get(url)["location"] == page_of(archived[0])
    monkeypatch.delitem(admin.site._registry, ArchivedTask)
    response = admin_client.get(url, follow=True)
    assert "Perhaps it was deleted?" in response.text
