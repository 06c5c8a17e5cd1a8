"""The admin pages of tasks: fields, buttons and permissions."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import pytest
from django.contrib.admin.models import LogEntry
from django.db.models.functions import Now
from django.urls import reverse

from django_pglock.models import Attempt, Task, Waiter
from django_pglock.store.after import insert_after
from django_pglock.store.call import Call
from tests.db.admin.visits import LIST, make, person, said
from tests.sample import tasks

pytestmark = pytest.mark.django_db

NOT_DELETED = "1 of the selected tasks was not deleted: it is not finished, or is still needed."


def delete(client, row):
    """Confirm the deletion of one task, and return the page that follows."""
    return client.post(reverse("admin:django_pglock_task_delete", args=[row.pk]), {"post": "yes"}, follow=True)


@pytest.mark.parametrize("status", ["READY", "SCHEDULED", "RUNNING", "SUCCESSFUL", "FAILED", "CANCELLED"])
def test_the_list_and_the_task_page_can_be_opened_for_each_status(client, status):
    person(client, "view_task")
    row = make(status)
    assert f"#{row.pk}" in client.get(LIST).content.decode()
    page = client.get(reverse("admin:django_pglock_task_change", args=[row.pk]))
    assert page.status_code == 200
    assert "_save" not in page.content.decode(), "nothing is edited by hand"


def test_a_button_applies_its_verb(client):
    person(client, "view_task", "retry_task")
    row = make("FAILED")
    url = reverse("admin:django_pglock_task_verb", args=[row.pk, "retry"])
    page = client.get(reverse("admin:django_pglock_task_change", args=[row.pk])).content.decode()
    assert url in page
    assert "django_pglock/admin.css" in page
    assert client.post(url).status_code == 302
    row.refresh_from_db()
    assert row.status == "READY"


@pytest.mark.parametrize("verb", ["reset_stuck", "retry", "run_now", "cancel"])
@pytest.mark.parametrize("key", [2**63 - 1, 10**30])
def test_a_verb_on_a_missing_task_is_404(client, verb, key):
    person(client, "view_task", "retry_task", "cancel_task", "reset_task")
    assert client.post(reverse("admin:django_pglock_task_verb", args=[key, verb])).status_code == 404
    assert not LogEntry.objects.exists()


def test_a_user_with_the_view_right_sees_neither_buttons_nor_actions(client):
    person(client, "view_task")
    row = make("FAILED")
    assert 'name="action"' not in client.get(LIST).content.decode()
    page = reverse("admin:django_pglock_task_change", args=[row.pk])
    assert "pglock-verb" not in client.get(page).content.decode()
    assert client.post(page, {"status": "READY"}).status_code == 403


def test_a_task_that_was_started_again_is_not_deleted(client, monkeypatch):
    """Another user retries the task between the check of the permission and the deletion."""
    from django_pglock.admin.tasks import TaskAdmin

    person(client, "view_task", "delete_task")
    row = make("FAILED")
    Attempt.objects.create(
        task=row, number=1, worker=uuid4(), started_at=Now(), finished_at=Now(), outcome="FAILED",
        exception_path="x", traceback="x",
    )  # fmt: skip
    log = TaskAdmin.log_deletions

    def retry_first(self, request, queryset):
        Task.objects.filter(pk=row.pk).retry()
        return log(self, request, queryset)

    monkeypatch.setattr(TaskAdmin, "log_deletions", retry_first)
    assert said(delete(client, row)) == [NOT_DELETED]
    monkeypatch.undo()
    Task.objects.filter(pk=row.pk).update(status="FAILED", finished_at=Now())
    assert "was deleted successfully" in said(delete(client, row))[0]
    assert not Task.objects.exists()
    assert LogEntry.objects.get().is_deletion()


@pytest.mark.django_db(transaction=True)
def test_a_task_for_which_another_session_has_enqueued_another_is_not_deleted(client, monkeypatch, in_threads):
    """The other session has committed before the deletion, and has not yet released the new task."""
    from django_pglock.admin.tasks import TaskAdmin

    person(client, "view_task", "delete_task")
    row = make("SUCCESSFUL")
    log = TaskAdmin.log_deletions

    def enqueue_first(self, request, queryset):
        # Nothing is released, as if the process of the caller were killed right after its commit.
        later = tasks.nothing.using(after=[str(row.pk)])
        in_threads(lambda _: insert_after("default", later, Call("[]", "{}"), "{}"), 1)
        return log(self, request, queryset)

    monkeypatch.setattr(TaskAdmin, "log_deletions", enqueue_first)
    assert said(delete(client, row)) == [NOT_DELETED]
    assert Task.objects.filter(pk=row.pk).exists()
    assert Waiter.objects.get().awaited == row.pk
    assert not LogEntry.objects.exists(), "the log names only what was deleted"


def test_a_task_whose_unique_key_is_taken_for_a_period_is_not_deleted(client):
    person(client, "view_task", "delete_task")
    row = make("SUCCESSFUL", unique_key="x", unique_scope="PERIOD", unique_until=Now() + timedelta(hours=1))
    assert said(delete(client, row)) == [NOT_DELETED]
    Task.objects.filter(pk=row.pk).update(unique_until=Now() - timedelta(seconds=1))
    assert NOT_DELETED not in said(delete(client, row))
    assert not Task.objects.exists()


def test_tasks_are_not_added_and_only_finished_tasks_are_deleted(client):
    person(client, "view_task", "add_task", "change_task", "delete_task")
    assert client.get(reverse("admin:django_pglock_task_add")).status_code == 403
    running, finished = make("RUNNING"), make("SUCCESSFUL")
    for row, status in ((running, 403), (finished, 302)):
        url = reverse("admin:django_pglock_task_delete", args=[row.pk])
        assert client.post(url, {"post": "yes"}).status_code == status
    assert list(Task.objects.all()) == [running]
