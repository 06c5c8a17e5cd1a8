"""Enqueueing by form: any function, or a task again with other arguments. Hidden values stay hidden."""

from __future__ import annotations

import html

import pytest
from django.contrib.admin.models import LogEntry

from django_pglock import task
from django_pglock.models import Task
from tests.db.admin.visits import LIST, make, page_of, person, said, url

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("own_registry")]

PAGE = url("task", "enqueue")
SECRET = "4111-1111"


def greet(name: str, times: int = 1, *more, loud=False, **extras): ...


def pay(order_id: int, card, /, note: str = ""): ...


def enqueue(client, function, **typed):
    return client.post(f"{PAGE}?function={function.module_path}", typed, follow=True)


def again(row):
    return url("task", "again", row.pk)


def test_a_task_is_enqueued_with_the_arguments_that_were_typed(client):
    person(client, "view_task", "add_task")
    greeting = task(greet)
    page = html.unescape(client.get(PAGE, {"function": greeting.module_path}).content.decode())
    assert "(name: str, times: int = 1, *more, loud=False, **extras)" in page
    assert "hidden arguments" not in page
    response = enqueue(client, greeting, args='["007", 3]', kwargs='{"loud": true, "a": [1]}')
    [row] = Task.objects.all()
    assert (row.args, row.kwargs) == (["007", 3], {"loud": True, "a": [1]})
    assert response.redirect_chain[-1][0] == url("task", "change", row.pk)
    assert said(response) == [f'Task <a href="{response.redirect_chain[-1][0]}">#{row.pk}</a> was enqueued.']
    entry = LogEntry.objects.get()
    assert (entry.object_id, entry.change_message) == (str(row.pk), f"enqueue: {greeting.module_path} #{row.pk}")


def test_an_empty_text_is_no_argument(client):
    person(client, "view_task", "add_task")
    enqueue(client, task(greet), args="", kwargs='{"name": "x"}')
    assert (Task.objects.get().args, Task.objects.get().kwargs) == ([], {"name": "x"})


@pytest.mark.parametrize(
    ("typed", "error"),
    [
        ({}, "missing a required argument"),
        ({"kwargs": '{"name": "x"'}, "Enter a valid JSON"),
        ({"kwargs": '["x"]'}, "Give a JSON object"),
        ({"args": "x"}, "Enter a valid JSON"),
        ({"args": '{"name": "x"}'}, "Give a JSON list"),
        ({"args": '["x"]', "kwargs": '{"name": "x"}'}, "multiple values"),
        ({"args": "[NaN]"}, "NaN or infinity"),
        ({"args": "[1e999]"}, "NaN or infinity"),
        ({"args": '["\\u0000"]'}, "NUL"),
    ],
)
def test_arguments_that_enqueue_refuses_are_errors_of_the_form(client, typed, error):
    person(client, "view_task", "add_task")
    response = enqueue(client, task(greet), **typed)
    assert response.status_code == 200
    assert error in str(response.context["form"].errors)
    assert not Task.objects.exists()
    assert not LogEntry.objects.exists()


def test_a_function_that_this_process_does_not_know_is_not_imported(client):
    person(client, "view_task", "add_task")
    page = client.get(PAGE, {"function": "os.abort"}).content.decode()
    assert "This process does not know the function os.abort." in page
    assert 'method="post" autocomplete' not in page
    assert not client.post(f"{PAGE}?function=os.abort", {"args": "[]"}).context.get("form")


def test_each_form_needs_its_own_permission(client):
    row = make("FAILED")
    person(client, "view_task", "change_task", "retry_task")
    assert client.get(PAGE).status_code == 403
    assert 'href="enqueue/"' not in client.get(LIST).content.decode()
    assert client.get(again(row)).status_code == 200
    person(client, "view_task", "add_task", "retry_task")
    assert client.get(again(row)).status_code == 403
    assert again(row) not in page_of(client, row)
    assert 'href="enqueue/"' in client.get(LIST).content.decode()
    person(client, "add_task")
    assert client.get(PAGE).status_code == 200, "the form shows no task"


def test_a_task_runs_again_with_other_arguments(client):
    person(client, "view_task", "change_task")
    paying = task(queue_name="default")(pay)
    row = make("FAILED", task_path=paying.module_path, args=[7, "4111"], kwargs={"note": "first"}, priority=5)
    page = html.unescape(client.get(again(row)).content.decode())
    assert '[7, "4111"]' in page
    assert '{"note": "first"}' in page
    client.post(again(row), {"args": '[8, "4111"]', "kwargs": '{"note": "second"}'})
    made = Task.objects.exclude(pk=row.pk).get()
    assert (made.args, made.kwargs) == ([8, "4111"], {"note": "second"})
    assert (made.queue, made.priority, made.status) == (row.queue, 5, "READY")
    row.refresh_from_db()
    assert row.status == "FAILED", "it is another task"


@pytest.mark.parametrize("hook", [None, lambda path, name, value: "***"])
def test_a_form_never_begins_with_hidden_arguments(client, settings, hook):
    """The text of a hidden value would be enqueued as the value."""
    person(client, "view_task", "change_task")
    about = {"args": [7, SECRET], "kwargs": {"note": "first"}, "meta": {"redact": [] if hook else ["card"]}}
    row = make("FAILED", task_path=task(redact=() if hook else ("card",))(pay).module_path, **about)
    settings.DJANGO_PGLOCK = {**settings.DJANGO_PGLOCK, "REDACT": hook}
    response = client.get(again(row))
    assert "Type all arguments that the form does not show." in response.content.decode()
    assert SECRET not in response.content.decode()
    assert response.context["form"].initial == ({} if hook else {"kwargs": {"note": "first"}})
    refused = client.post(again(row), {})
    assert "missing a required argument" in str(refused.context["form"].errors)
    assert Task.objects.get() == row


def test_a_task_runs_again_in_its_own_backend(client, settings):
    """The default backend of its function may store tasks in another database."""
    settings.TASKS = {**settings.TASKS, "reports": settings.TASKS["default"]}
    person(client, "view_task", "change_task")
    row = make("FAILED", backend="reports")
    client.post(again(row), {})
    assert Task.objects.exclude(pk=row.pk).get().backend == "reports"
    del settings.TASKS["reports"]
    Task.objects.filter(pk=row.pk).update(backend="gone")
    assert "gone" in client.post(again(row), {}).content.decode(), "the form says that there is no such backend"
