"""Enqueueing by form: any function, or a task again with other arguments."""

from __future__ import annotations

import pytest
from django.contrib.admin.models import LogEntry
from django.urls import reverse

from django_pglock import task
from django_pglock.models import Task
from tests.db.admin.forms import PAGE, SECRET, enqueue, greet, pay
from tests.db.admin.visits import LIST, make, person, said

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("own_registry")]


def test_a_task_is_enqueued_from_the_signature_of_its_function(client):
    person(client, "view_task", "add_task")
    greeting = task(greet)
    page = client.get(PAGE, {"function": greeting.module_path}).content.decode()
    for name in ("name", "times", "more", "loud", "extras"):
        assert f'name="argument-{name}"' in page
    response = enqueue(client, greeting, name="007", times="3", loud="true", extras='{"a": [1]}')
    [row] = Task.objects.all()
    assert (row.args, row.kwargs) == ([], {"name": "007", "times": 3, "loud": True, "a": [1]})
    assert response.redirect_chain[-1][0] == reverse("admin:django_pglock_task_change", args=[row.pk])
    assert said(response) == [f'Task <a href="{response.redirect_chain[-1][0]}">#{row.pk}</a> was enqueued.']
    entry = LogEntry.objects.get()
    assert (entry.object_id, entry.change_message) == (str(row.pk), f"enqueue: {greeting.module_path} #{row.pk}")


@pytest.mark.parametrize(
    ("typed", "error"),
    [
        ({}, "This field is required."),
        ({"name": "x", "times": "many"}, "Enter a whole number."),
        ({"name": "x", "loud": "yes"}, "Enter a valid JSON."),
        ({"name": "x", "loud": "[" * 100_000}, "Enter a valid JSON."),
        ({"name": "x", "more": "1"}, "Give a JSON list"),
        ({"name": "x", "extras": "[1]"}, "Give a JSON object"),
        ({"name": "x", "loud": "NaN"}, "NaN or infinity"),
        ({"name": "x", "extras": '{"name": 1}'}, "Give each argument in its own field."),
    ],
)
def test_arguments_that_enqueue_refuses_are_errors_of_the_form(client, typed, error):
    person(client, "view_task", "add_task")
    response = enqueue(client, task(greet), **typed)
    assert response.status_code == 200
    assert error in response.content.decode()
    assert not Task.objects.exists()
    assert not LogEntry.objects.exists()


def test_a_function_that_this_process_does_not_know_is_not_imported(client):
    person(client, "view_task", "add_task")
    page = client.get(PAGE, {"function": "os.abort"}).content.decode()
    assert "This process does not know the function os.abort." in page
    assert 'method="post" autocomplete' not in page


def test_each_form_needs_its_own_permission(client):
    row = make("FAILED")
    again = reverse("admin:django_pglock_task_again", args=[row.pk])
    person(client, "view_task", "change_task", "retry_task")
    assert client.get(PAGE).status_code == 403
    assert 'href="enqueue/"' not in client.get(LIST).content.decode()
    assert client.get(again).status_code == 200
    person(client, "view_task", "add_task", "retry_task")
    assert client.get(again).status_code == 403
    assert again not in client.get(reverse("admin:django_pglock_task_change", args=[row.pk])).content.decode()
    assert 'href="enqueue/"' in client.get(LIST).content.decode()
    person(client, "add_task")
    assert client.get(PAGE).status_code == 200, "the form shows no task"


def test_a_task_runs_again_with_other_arguments_and_hidden_ones_stay_hidden(client):
    person(client, "view_task", "change_task")
    paying = task(redact=("card",), queue_name="default")(pay)
    row = make("FAILED", task_path=paying.module_path, args=[7, SECRET], kwargs={"note": "first"}, priority=5,
               meta={"redact": ["card"]})  # fmt: skip
    url = reverse("admin:django_pglock_task_again", args=[row.pk])
    page = client.get(url).content.decode()
    assert SECRET not in page
    assert "first" in page
    response = client.post(url, {"argument-order_id": "8", "argument-card": "", "argument-note": "second"}, follow=True)
    made = Task.objects.exclude(pk=row.pk).get()
    assert (made.args, made.kwargs) == ([8, SECRET], {"note": "second"}), "left empty: the value of the earlier task"
    assert (made.queue, made.priority, made.status) == (row.queue, 5, "READY")
    assert SECRET not in response.content.decode()
    row.refresh_from_db()
    assert row.status == "FAILED", "it is another task"
    assert SECRET not in client.post(url, {"argument-order_id": "x"}).content.decode()


def test_a_task_runs_again_in_its_own_backend(client, settings):
    """The default backend of its function may store tasks in another database."""
    settings.TASKS = {**settings.TASKS, "reports": settings.TASKS["default"]}
    person(client, "view_task", "change_task")
    row = make("FAILED", backend="reports")
    url = reverse("admin:django_pglock_task_again", args=[row.pk])
    client.post(url, {})
    assert Task.objects.exclude(pk=row.pk).get().backend == "reports"
    del settings.TASKS["reports"]
    Task.objects.filter(pk=row.pk).update(backend="gone")
    assert "gone" in client.post(url, {}).content.decode(), "the form says that there is no such backend"
