"""The steps of a task on its page."""

from __future__ import annotations

import pytest
from django.urls import reverse

from django_pglock import emit
from django_pglock.models import Task
from django_pglock.testing import run_tasks
from tests.sample import step_tasks

pytestmark = pytest.mark.django_db(transaction=True)


def test_the_page_of_a_task_shows_its_steps_and_for_what_it_waits(client):
    step_tasks.CALLS.clear()
    result = step_tasks.order.enqueue(7)
    address = reverse("admin:django_pglock_task_change", args=[result.id])
    run_tasks(until="due")
    page = client.get(address).content.decode()
    assert "This task sleeps." in page
    assert "<td>charge</td><td>step</td>" in page
    assert "<td>{&quot;name&quot;: &quot;charge&quot;}</td>" in page
    Task.objects.all().run_now()
    run_tasks(until="due")
    assert "This task waits for the event packed:7." in client.get(address).content.decode()
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
