"""The admin pages of tasks: fields, buttons and permissions."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.contrib.admin.models import LogEntry
from django.db.models.functions import Now

from django_pglock.models import Task, Waiter
from tests.db.admin.visits import LIST, add_attempt, logged, make, page_of, person, said, url

pytestmark = pytest.mark.django_db

NOT_DELETED = "1 of the selected tasks was not deleted: it is not finished, or is still needed."


def delete(client, row):
    """Confirm the deletion of one task, and return the page that follows."""
    return client.post(url("task", "verb", row.pk, "delete_finished"), {"confirmed": "1"}, follow=True)


@pytest.mark.parametrize("status", ["READY", "SCHEDULED", "RUNNING", "SUCCESSFUL", "FAILED", "CANCELLED"])
def test_the_list_and_the_task_page_can_be_opened_for_each_status(client, status):
    person(client, "view_task")
    row = make(status)
    assert f"#{row.pk}" in client.get(LIST).content.decode()
    page = client.get(url("task", "change", row.pk))
    assert page.status_code == 200
    assert "_save" not in page.content.decode(), "nothing is edited by hand"


def test_a_button_applies_its_verb(client):
    person(client, "view_task", "retry_task")
    row = make("FAILED")
    address = url("task", "verb", row.pk, "retry")
    page = page_of(client, row)
    assert address in page
    assert "django_pglock/admin.css" in page
    assert client.post(address)["Location"] == url("task", "change", row.pk)
    row.refresh_from_db()
    assert row.status == "READY"


@pytest.mark.parametrize("verb", ["reset_stuck", "retry", "run_now", "cancel"])
@pytest.mark.parametrize("key", [2**63 - 1, 10**30])
def test_a_verb_on_a_missing_task_is_404(client, verb, key):
    person(client, "view_task", "retry_task", "cancel_task", "reset_task")
    assert client.post(url("task", "verb", key, verb)).status_code == 404
    assert not LogEntry.objects.exists()


def test_the_button_that_deletes_asks_for_confirmation(client):
    person(client, "view_task", "delete_task")
    row = make("FAILED", attempts=1)
    add_attempt(row)
    button = url("task", "verb", row.pk, "delete_finished")
    assert button in page_of(client, row)
    assert "1 finished task would be deleted, with its attempts." in client.post(button).content.decode()
    assert Task.objects.exists()
    assert not LogEntry.objects.exists()
    assert said(delete(client, row)) == ["1 task was deleted."]
    assert not Task.objects.exists()
    assert logged() == ["delete_finished: 1"]


def test_a_task_that_was_started_again_is_not_deleted(client):
    """Another user has retried the task since the question was shown."""
    person(client, "view_task", "delete_task")
    row = make("FAILED")
    Task.objects.filter(pk=row.pk).retry()
    assert said(delete(client, row)) == [NOT_DELETED]
    assert Task.objects.exists()


def test_a_task_for_which_others_wait_is_not_deleted(client):
    person(client, "view_task", "delete_task")
    row = make("SUCCESSFUL")
    Waiter.objects.create(task=make("BLOCKED"), awaited=row.pk)
    assert said(delete(client, row)) == [NOT_DELETED]


def test_a_task_whose_unique_key_is_taken_for_a_period_is_not_deleted(client):
    person(client, "view_task", "delete_task")
    row = make("SUCCESSFUL", unique_key="x", unique_scope="PERIOD", unique_until=Now() + timedelta(hours=1))
    assert said(delete(client, row)) == [NOT_DELETED]
    Task.objects.filter(pk=row.pk).update(unique_until=Now() - timedelta(seconds=1))
    assert NOT_DELETED not in said(delete(client, row))
    assert not Task.objects.exists()
