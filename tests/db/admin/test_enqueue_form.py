"""The form that enqueues a task: how values are read, and which stay hidden."""

from __future__ import annotations

import html

import pytest
from django.urls import reverse

from django_pglock import task
from django_pglock.admin.enqueue_form import EnqueueForm
from django_pglock.models import Task
from django_pglock.tasks.redaction import NOT_SHOWN
from tests.db.admin.forms import SECRET, enqueue, greet, pay
from tests.db.admin.visits import make, person

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("own_registry")]


def with_context(context, value): ...


@pytest.mark.parametrize(
    ("function", "typed", "call"),
    [
        (greet, {"name": "x"}, ([], {"name": "x"})),
        (greet, {"name": "x", "more": "[1, 2]"}, (["x", 1, 1, 2], {})),
        (pay, {"order_id": "7", "card": '{"n": 1}'}, ([7, {"n": 1}], {})),
        (with_context, {"value": '"x"'}, ([], {"value": "x"})),
    ],
)
def test_values_are_passed_as_the_function_takes_them(function, typed, call):
    definition = task(takes_context=True)(function) if function is with_context else task(function)
    form = EnqueueForm(definition, {f"argument-{name}": value for name, value in typed.items()})
    assert form.is_valid(), form.errors
    assert form.call() == call


def test_a_value_with_a_hidden_part_is_hidden_as_a_whole(client):
    person(client, "view_task", "change_task")
    paying = task(redact=("number",))(pay)
    row = make("FAILED", task_path=paying.module_path, args=[7, {"number": SECRET, "cvc": "123"}],
               meta={"redact": ["number"]})  # fmt: skip
    url = reverse("admin:django_pglock_task_again", args=[row.pk])
    assert "[redacted]" not in client.get(url).content.decode(), "it would be enqueued as the value"
    client.post(url, {"argument-order_id": "7", "argument-card": ""})
    assert Task.objects.exclude(pk=row.pk).get().args == [7, {"number": SECRET, "cvc": "123"}]


def test_a_value_that_is_too_deep_to_be_shown_is_enqueued_again_as_it_is(client):
    person(client, "view_task", "change_task")
    deep: list = []
    for _ in range(300):
        deep = [deep]
    row = make("FAILED", task_path=task(pay).module_path, args=[7, deep])
    url = reverse("admin:django_pglock_task_again", args=[row.pk])
    assert NOT_SHOWN not in html.unescape(client.get(url).content.decode()), "it would be enqueued as the value"
    client.post(url, {"argument-order_id": "8", "argument-card": ""})
    assert Task.objects.exclude(pk=row.pk).get().args == [8, deep]


@pytest.mark.parametrize(
    "text", ['"\\ud800"', "[1e999]", '"\\u0000"', "9" * 5000, "[" * 100_000], ids=["half", "inf", "NUL", "long", "deep"]
)
def test_json_that_cannot_be_stored_is_an_error_of_its_field(client, text):
    person(client, "view_task", "add_task")
    greeting = task(greet)
    response = enqueue(client, greeting, name="x", loud=text)
    assert response.status_code == 200
    assert response.context["form"].errors
    assert not Task.objects.exists()
