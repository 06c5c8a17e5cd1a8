"""Enqueueing by form: any function, or a task again with other arguments. Hidden values stay hidden."""

from __future__ import annotations

import html
import json

import pytest
from django.contrib.admin.models import LogEntry
from django.urls import reverse

from django_pglock import task
from django_pglock.admin.enqueue import _restored
from django_pglock.models import Task
from django_pglock.tasks.redaction import REDACTED
from tests.db.admin.visits import LIST, make, person, said

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("own_registry")]

PAGE = reverse("admin:django_pglock_task_enqueue")
SECRET = "4111-1111"


def greet(name: str, times: int = 1, *more, loud=False, **extras): ...


def pay(order_id: int, card, /, note: str = ""): ...


def enqueue(client, function, **typed):
    return client.post(f"{PAGE}?function={function.module_path}", typed, follow=True)


def again(row):
    return reverse("admin:django_pglock_task_again", args=[row.pk])


def test_a_task_is_enqueued_with_the_arguments_that_were_typed(client):
    person(client, "view_task", "add_task")
    greeting = task(greet)
    page = html.unescape(client.get(PAGE, {"function": greeting.module_path}).content.decode())
    assert "(name: str, times: int = 1, *more, loud=False, **extras)" in page
    assert "hidden value" not in page
    response = enqueue(client, greeting, args='["007", 3]', kwargs='{"loud": true, "a": [1]}')
    [row] = Task.objects.all()
    assert (row.args, row.kwargs) == (["007", 3], {"loud": True, "a": [1]})
    assert response.redirect_chain[-1][0] == reverse("admin:django_pglock_task_change", args=[row.pk])
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
        ({"kwargs": '{"name": "x"'}, "Give a JSON object"),
        ({"kwargs": '["x"]'}, "Give a JSON object"),
        ({"args": "x"}, "Give a JSON list"),
        ({"args": '{"name": "x"}'}, "Give a JSON list"),
        ({"args": '["x"]', "kwargs": '{"name": "x"}'}, "multiple values"),
        ({"args": "[" * 100_000}, "Give a JSON list"),
        ({"args": f"[{'9' * 5000}]"}, "Give a JSON list"),
        ({"args": "[NaN]"}, "NaN or infinity"),
        ({"args": "[1e999]"}, "NaN or infinity"),
        ({"args": '["\\ud800"]'}, "surrogate"),
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
    assert again(row) not in client.get(reverse("admin:django_pglock_task_change", args=[row.pk])).content.decode()
    assert 'href="enqueue/"' in client.get(LIST).content.decode()
    person(client, "add_task")
    assert client.get(PAGE).status_code == 200, "the form shows no task"


def test_a_task_runs_again_with_other_arguments_and_hidden_ones_stay_hidden(client):
    person(client, "view_task", "change_task")
    paying = task(redact=("card",), queue_name="default")(pay)
    row = make("FAILED", task_path=paying.module_path, args=[7, SECRET], kwargs={"note": "first"}, priority=5,
               meta={"redact": ["card"]})  # fmt: skip
    page = client.get(again(row)).content.decode()
    assert SECRET not in page
    assert "first" in page
    assert "A hidden value that stays where it is has the value of the earlier task." in page
    typed = {"args": f'[8, "{REDACTED}"]', "kwargs": '{"note": "second"}'}
    response = client.post(again(row), typed, follow=True)
    made = Task.objects.exclude(pk=row.pk).get()
    assert (made.args, made.kwargs) == ([8, SECRET], {"note": "second"}), (
        "left as it was: the value of the earlier task"
    )
    assert (made.queue, made.priority, made.status) == (row.queue, 5, "READY")
    assert SECRET not in response.content.decode()
    row.refresh_from_db()
    assert row.status == "FAILED", "it is another task"
    assert SECRET not in client.post(again(row), {"args": f'["{REDACTED}"', "kwargs": ""}).content.decode()


@pytest.mark.parametrize("args", [[REDACTED, 7], [7, {"card": REDACTED}], [7, "typed", REDACTED]])
def test_the_text_of_a_hidden_value_is_refused_in_another_place(client, args):
    """It would be enqueued as the value."""
    person(client, "view_task", "change_task")
    row = make("FAILED", task_path=task(redact=("card",))(pay).module_path, args=[7, SECRET], meta={"redact": ["card"]})
    response = client.post(again(row), {"args": json.dumps(args)})
    assert "A hidden value can stay only where it is." in str(response.context["form"].errors)
    assert SECRET not in response.content.decode()
    assert Task.objects.get() == row


@pytest.mark.parametrize(
    ("typed", "seen", "stored", "restored"),
    [
        (["x"], ["x"], ["x"], ["x"]),
        (
            {"a": {"b": 1, "c": REDACTED}},
            {"a": {"b": 0, "c": REDACTED}},
            {"a": {"b": 0, "c": 5}},
            {"a": {"b": 1, "c": 5}},
        ),
        # The setting REDACT may show any text instead of a value.
        (["***", 2], ["***", 1], ["secret", 1], ["secret", 2]),
        (["[", "["], REDACTED, "secret", ["[", "["]),
        ([REDACTED], [REDACTED], [REDACTED], [REDACTED]),
    ],
)
def test_a_hidden_value_is_taken_from_the_same_place_of_the_earlier_task(typed, seen, stored, restored):
    assert _restored(typed, seen, stored) == restored


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
