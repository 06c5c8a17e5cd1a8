"""The page with the stack of a running task: its permission, and its text."""

from __future__ import annotations

import pytest
from django.contrib.admin.models import LogEntry

from django_pglock.admin import task_page
from django_pglock.models import Task
from django_pglock.store.requests_to_worker import answer_stack
from tests.db.admin.visits import make, person, url, with_csrf_checks

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def short_timeout(monkeypatch):
    monkeypatch.setattr(task_page, "STACK_TIMEOUT", 0.0)


def address(task, page="stack"):
    return url("task", page, task.pk)


def test_requesting_a_stack_needs_its_permission_and_writes_an_audit_entry(client):
    running = make("RUNNING", attempts=1)
    person(client, "view_task", "change_task", "cancel_task", "retry_task")
    assert "Show stack" not in client.get(address(running, "change")).content.decode()
    assert [client.post(address(running)).status_code, client.get(address(running)).status_code] == [403, 403]
    person(client, "stack_task")
    assert client.post(address(running)).status_code == 403, "who may not view tasks"
    assert not Task.objects.filter(stack__isnull=False).exists()

    user = person(client, "view_task", "stack_task")
    assert "Show stack" in client.get(address(running, "change")).content.decode()
    assert "Nobody has asked" in client.get(address(running)).content.decode()
    assert not Task.objects.filter(stack__isnull=False).exists(), "to look is not to ask"
    assert client.post(address(running)).headers["Location"] == address(running)
    assert Task.objects.get(stack__isnull=False).pk == running.pk
    entry = LogEntry.objects.get()
    assert (entry.user, entry.object_id, entry.change_message) == (user, str(running.pk), "stack: asked for")
    assert client.put(address(running)).status_code == 405

    assert with_csrf_checks(user).post(address(running)).status_code == 403


def test_the_page_says_what_the_worker_has_answered(client):
    running = make("RUNNING", attempts=3)
    person(client, "view_task", "stack_task")
    client.post(address(running))
    assert "has not answered" in client.get(address(running)).content.decode()
    answer_stack("default", running.pk, 3, running.worker, '  File "bank.py", line 88, in <module>\n    charge()')
    page = client.get(address(running)).content.decode()
    assert "line 88, in &lt;module&gt;" in page
    assert "Claim 3" in page
    assert not [each for each in (" style=", "onclick", "<script>") if each in page]
    client.post(address(running))
    assert "has not answered" in client.get(address(running)).content.decode(), "to the new request"
    answer_stack("default", running.pk, 3, running.worker, "")
    assert "the function does not run" in client.get(address(running)).content.decode()


@pytest.mark.parametrize("status", ["READY", "SUCCESSFUL", "FAILED"])
def test_only_a_running_task_has_the_button(client, status):
    row = make(status)
    person(client, "view_task", "stack_task")
    assert "Show stack" not in client.get(address(row, "change")).content.decode()
    answer = client.post(address(row), follow=True)
    assert answer.redirect_chain == [(address(row, "change"), 302)]
    assert [str(each) for each in answer.context["messages"]] == ["The task does not run any more."]
    assert not LogEntry.objects.exists()
    assert client.get(url("task", "stack", 10**12)).status_code == 404
