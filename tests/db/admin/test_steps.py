"""The steps of a task on its page."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from io import StringIO

import pytest
from django.core.management import call_command
from django.db.models.functions import Now
from django.urls import reverse

from django_pglock import emit
from django_pglock.models import Step, Task
from django_pglock.testing import run_tasks
from tests.db.admin.visits import LIST, logged, make, page_of, person, said, url
from tests.sample import step_tasks

pytestmark = pytest.mark.django_db(transaction=True)


def test_the_page_of_a_task_shows_its_steps_and_for_what_it_waits(client):
    step_tasks.CALLS.clear()
    result = step_tasks.order.enqueue(7)
    address = reverse("admin:django_pglock_task_change", args=[result.id])
    run_tasks(until="due")
    page = client.get(address).content.decode()
    assert "This task sleeps until 20" in page
    assert "<td>charge</td><td>step</td>" in page
    assert "<td>{&quot;name&quot;: &quot;charge&quot;}</td>" in page
    Task.objects.all().run_now()
    run_tasks(until="due")
    assert "This task waits for the event packed:7 until 20" in client.get(address).content.decode()
    emit("packed:7", "a parcel")
    run_tasks(until="due")
    assert "<td>&quot;a parcel&quot;</td>" in client.get(address).content.decode()


def test_a_failed_step_shows_its_failure_and_hidden_results_are_hidden(client):
    step_tasks.FAILING["hotel"] = 2
    result = step_tasks.trip.enqueue()
    run_tasks()
    Task.objects.update(meta={"redact": True})
    page = client.get(reverse("admin:django_pglock_task_change", args=[result.id])).content.decode()
    assert "<td>ConnectionError: hotel fails</td>" in page
    assert "[redacted]" in page
    assert "&quot;flight&quot;" not in page


def test_a_task_runs_again_from_a_step(client):
    """The steps before it stay recorded."""
    person(client, "view_task", "retry_task")
    result = step_tasks.order.enqueue(7)
    run_tasks(until="due")
    address = url("task", "change", result.id)
    assert "Run again from here" in client.get(address).content.decode()
    assert Task.objects.get(pk=result.id).status == "SCHEDULED"
    again = url("task", "again_from", result.id)
    assert said(client.post(again, {"step": "book"}, follow=True)) == ["The task will run again from this step: book."]
    assert logged() == ["again from step book: 2 steps"]
    assert list(Step.objects.filter(task=result.id).values_list("name", flat=True)) == ["charge"]
    assert Task.objects.get(pk=result.id).status == "READY"
    assert said(client.post(again, {"step": "other"}, follow=True))[0].startswith("Nothing was changed")
    person(client, "view_task")
    assert client.post(again, {"step": "charge"}).status_code == 403
    assert "Run again from here" not in client.get(address).content.decode()


def test_the_page_of_a_task_shows_the_tasks_before_it_as_one(client):
    parts = [make(status) for status in ("SUCCESSFUL", "FAILED", "RUNNING", "READY", "CANCELLED")]
    final = make("BLOCKED", waits_for=2, meta={"after_ended": [*(each.pk for each in parts), 10**9]})
    page = page_of(client, final)
    assert "Of 6 tasks for which it waits or waited, 4 have ended; 2 of them did not succeed." in page
    assert page.count(f">#{parts[1].pk}</a>") == 2
    assert "waits or waited" not in page_of(client, make("BLOCKED", meta={"after": [parts[0].pk]}))


def test_long_results_are_cut_and_large_ones_are_not_read(client):
    task = make("SCHEDULED", attempts=1, started_at=Now())
    for number, result in enumerate(["x" * 500, {"rows": list(range(20_000))}, None, "ä"], 1):
        Step.objects.create(
            task=task, name=f"s{number}", number=number, kind="STEP", result=result, attempt=1, started_at=Now()
        )
    address = url("task", "change", task.pk)
    said = [row["said"] for row in client.get(address).context["pglock_steps"]]
    assert [(len(each), each[-1:]) for each in said] == [(201, "…"), (1, "…"), (0, ""), (3, '"')]
    Task.objects.update(meta={"redact": ["s1"]})
    said = [row["said"] for row in client.get(address).context["pglock_steps"]]
    assert [(len(each), each[-1:]) for each in said] == [(12, '"'), (201, "…"), (0, ""), (3, '"')]


@pytest.mark.parametrize(
    ("redact", "shown"),
    [
        (["charge"], ["[redacted]", {"name": "book"}, None]),
        (["name"], [{"name": "[redacted]"}, {"name": "[redacted]"}, None]),
        (True, ["[redacted]"] * 3),
        ([], [{"name": "charge"}, {"name": "book"}, None]),
    ],
    ids=["by the name of the step", "inside of results", "all", "nothing"],
)
def test_results_of_steps_are_redacted_on_the_page_and_at_the_command_line(client, redact, shown):
    result = step_tasks.order.enqueue(7)
    run_tasks(until="due")
    Task.objects.update(meta={"redact": redact})
    page = client.get(url("task", "change", result.id)).context["pglock_steps"]
    assert [json.loads(row["said"] or "null") for row in page] == shown
    call_command("locktasks", "show", result.id, "--json", stdout=(out := StringIO()))
    assert [each["result"] for each in json.loads(out.getvalue())["steps"]] == shown


class Forms(HTMLParser):
    """Notes the forms that begin inside of another one: a browser drops their tags."""

    def __init__(self):
        super().__init__()
        self.depth, self.nested = 0, []

    def handle_starttag(self, tag, attributes):
        self.depth += tag == "form"
        if tag == "form" and self.depth > 1:
            self.nested.append(dict(attributes))

    def handle_endtag(self, tag):
        self.depth -= tag == "form"


def test_no_form_of_a_page_is_inside_of_another_one(client):
    person(client, "view_task", "retry_task", "cancel_task", "change_task", "stack_task", "view_queue", "pause_queue")
    result = step_tasks.order.enqueue(7)
    run_tasks(until="due")
    pages = [url("task", "change", result.id), LIST, url("queue"), url("task", "change", make("RUNNING").pk)]
    for page in pages:
        forms = Forms()
        forms.feed(client.get(page).content.decode())
        assert (forms.nested, forms.depth) == ([], 0), page
