"""The charts of the overview: which numbers they show, and what one may choose."""

from __future__ import annotations

import pytest
from django.utils import timezone

from django_pglock.admin.charts import SPANS, duration
from django_pglock.models import Queue
from django_pglock.store.numbers import Counts, add_numbers
from tests.db.admin.visits import person, url

pytestmark = pytest.mark.django_db

PAGE = url("overview")
PATH = "tests.sample.tasks.nothing"


def note(minutes_ago, queue="mail", path=PATH, **numbers):
    counts = Counts(**numbers)
    counts.wait[10] = counts.run[20] = counts.attempts
    add_numbers("default", {(int(timezone.now().timestamp() // 60 - minutes_ago) * 60, queue, path): counts})


def drawn(client, **query):
    charts = client.get(PAGE, query).context["charts"]
    return {chart.name: {line.label: line.values for line in chart.lines} for chart in charts}


@pytest.fixture
def history(client):
    person(client, "view_task")
    note(5, succeeded=30, failed=2, retried=1)
    note(5, queue="reports", path="another.function", succeeded=7)
    note(60 * 30, succeeded=100)


@pytest.mark.parametrize(
    ("query", "steps", "succeeded"),
    [
        ({}, 61, 37), ({"span": "hour", "queue": "mail"}, 61, 30), ({"task_path": "another.function"}, 61, 7),
        ({"span": "day"}, 25, 37), ({"span": "week"}, 169, 137), ({"span": "month"}, 61, 37),
        ({"queue": "nobody"}, 61, 0),
    ],
)  # fmt: skip
def test_the_charts_count_the_chosen_tasks(client, history, query, steps, succeeded):
    values = drawn(client, **query)["finished"]["succeeded"]
    assert len(values) in (steps - 1, steps)
    assert sum(values) == succeeded


def test_failures_and_times_have_charts_of_their_own(client, history):
    found = drawn(client, queue="mail")
    assert sum(found["failures"]["the last of their task"]) == 2
    assert sum(found["failures"]["retried"]) == 1
    for name in ("wait", "run"):
        known = [value for value in found[name]["p50"] if value is not None]
        assert len(known) == 1, "a minute in which nothing ended has no median"
        assert known[0] <= max(value for value in found[name]["p95"] if value is not None)


def test_the_selected_filters_of_the_charts_are_in_the_form_and_the_link_that_refreshes(client, history):
    page = client.get(PAGE, {"span": "week", "queue": "mail", "task_path": "gone.function"}).content.decode()
    for text in ('<option value="week" selected>', "<option selected>mail</option>", "<option selected>gone.function"):
        assert text in page
    assert '<a href="?span=week&amp;queue=mail&amp;task_path=gone.function">Refresh</a>' in page


def test_a_queue_shows_how_many_tasks_finish_in_a_minute(client, history):
    Queue.objects.pause("default")
    note(4, queue="default", succeeded=40, failed=5, cancelled=5, retried=100)
    note(0, queue="default", succeeded=1000)
    note(50, queue="default", succeeded=1000)
    rows = {row["name"]: row["rate"] for row in client.get(PAGE).context["queues"]["rows"]}
    assert rows["default"] == "10", "of the last five minutes that are complete"


def test_without_a_history_the_charts_are_empty(client):
    person(client, "view_task")
    assert len(drawn(client)) == 4
    person(client, "view_worker")
    assert "charts" not in client.get(PAGE).context


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0014, "1 ms"), (0.25, "250 ms"), (1.5, "1.5 s"), (119, "119.0 s"), (150, "2.5 min"), (9000, "2.5 h")],
)
def test_durations_have_units(seconds, text):
    assert duration(seconds) == text


def test_each_time_span_of_the_charts_has_at_most_168_points():
    for span in SPANS:
        assert span.length / span.step <= 168, "one row for each point"
