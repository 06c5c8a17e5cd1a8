"""The numbers: rows that workers add to, depths that one counts for all, what is read, and when it is deleted."""

from __future__ import annotations

from dataclasses import fields
from datetime import datetime, timedelta, timezone

import pytest
from django.db import connection
from django.db.models import F
from django.test.utils import CaptureQueriesContext

from django_pglock.models import Number, Queue, Task
from django_pglock.store import numbers
from django_pglock.store.numbers import (
    ALL,
    BUCKETS,
    KEPT,
    OUTCOMES,
    Counts,
    add_numbers,
    add_rescued,
    bucket_of,
    counters,
    depths,
    finished_per_minute,
    prune_numbers,
    queues_without_row,
    series,
    totals,
)
from tests.db.admin.visits import make
from tests.sample import tasks

pytestmark = pytest.mark.django_db

# A date long ago, because workers of other tests write history, too.
NOON = datetime(2021, 11, 22, 12, tzinfo=timezone.utc)
MINUTE = int(NOON.timestamp())


def counts(*, wait=0.0, run=0.0, **outcomes):
    made = Counts(**outcomes)
    made.wait_seconds, made.run_seconds = wait * made.attempts, run * made.attempts
    made.wait[bucket_of(wait)] = made.run[bucket_of(run)] = made.attempts
    return made


def minutes(**span):
    return series("default", NOON, NOON + timedelta(minutes=3), 60, **span)


def test_numbers_are_added_to_minutes_hours_queues_and_the_whole():
    add_numbers("default", {(MINUTE, "mail", "app.send"): counts(succeeded=3, run=2.0)})
    add_numbers("default", {(MINUTE, "mail", "app.send"): counts(succeeded=1, failed=2, run=0.1)})
    add_numbers("default", {(MINUTE + 60, "bulk", "app.send"): counts(retried=5, run=30.0)})

    whole = [
        (point.started_at, point.counts.succeeded, point.counts.failed, point.counts.retried) for point in minutes()
    ]
    assert whole == [(NOON, 4, 2, 0), (NOON + timedelta(minutes=1), 0, 0, 5), (NOON + timedelta(minutes=2), 0, 0, 0)]
    assert [point.counts.attempts for point in minutes(queue="mail")] == [6, 0, 0]
    assert [point.counts.attempts for point in minutes(task_path="app.send")] == [6, 5, 0]
    assert [point.counts.attempts for point in minutes(queue="bulk", task_path="app.send")] == [0, 5, 0]
    for unknown in ({"queue": "unknown"}, {"task_path": "unknown"}):
        assert [point.counts.attempts for point in minutes(**unknown)] == [0, 0, 0]
    [hour] = series("default", NOON, NOON + timedelta(hours=1), 3600)
    assert (hour.counts.attempts, hour.counts.run_seconds) == (11, pytest.approx(156.3))
    assert set(Number.objects.values_list("seconds", flat=True)) == {0, 60, 3600}
    assert [(each.queue, each.counts.attempts) for each in counters("default")] == [("bulk", 5), ("mail", 6)]


def test_every_number_is_added():
    numbers = {each.name: number for number, each in enumerate(fields(Counts), 1) if each.type in ("int", "float")}
    assert set(OUTCOMES) < set(numbers)
    assert Counts(succeeded=1, failed=2, cancelled=4, retried=8, snoozed=16, lost=32).finished == 7
    both = Counts(**numbers)
    both.add(Counts(**numbers))
    for _ in range(2):
        add_numbers("default", {(MINUTE, "mail", "app.send"): Counts(**numbers)})
    found = minutes()[0].counts
    for each in (both, found):
        assert {name: getattr(each, name) for name in numbers} == {name: 2 * number for name, number in numbers.items()}
        assert len(each.wait) == len(each.run) == BUCKETS


def test_attempts_of_rescued_tasks_are_counted_by_the_status_that_they_have_now():
    now = datetime.now(timezone.utc)
    statuses = ["READY", "BLOCKED", "BLOCKED", "FAILED", "FAILED", "FAILED", "FAILED", "CANCELLED"]
    add_rescued("default", [("rescued", "app.send", status) for status in statuses])
    [found] = totals("default", now - timedelta(minutes=5), now + timedelta(minutes=5))
    assert (found.counts.lost, found.counts.failed, found.counts.cancelled, found.counts.attempts) == (3, 4, 1, 8)
    add_rescued("default", [])


def test_histograms_are_added_element_by_element_whichever_is_longer():
    first, second = counts(succeeded=95, wait=0.002, run=50.0), counts(succeeded=5, wait=90.0, run=0.01)
    for path, order in (("app.send", (first, second)), ("app.open", (second, first))):
        for each in order:
            add_numbers("default", {(MINUTE, "mail", path): each})

        found = minutes(task_path=path)[0].counts
        assert (sum(found.wait), sum(found.run)) == (100, 100)
        assert found.wait_quantile(0.95) == pytest.approx(0.002, rel=0.42)
        assert found.wait_quantile(0.96) == pytest.approx(90, rel=0.42)
        assert found.run_quantile(0.5) == pytest.approx(50, rel=0.42)
        assert found.run_quantile(0.05) == pytest.approx(0.01, rel=0.42)


def test_one_message_adds_all_history_counts_of_a_worker():
    counted = {
        (MINUTE + 60 * minute, f"queue {queue}", f"app.task_{path}"): counts(succeeded=1)
        for minute in (0, 1)
        for queue in range(3)
        for path in range(10)
    }
    with CaptureQueriesContext(connection) as queries:
        add_numbers("default", counted)
    assert len(queries) == 1
    assert [point.counts.succeeded for point in minutes()] == [30, 30, 0]


def test_a_step_of_several_minutes_begins_at_a_multiple_of_itself():
    add_numbers("default", {(MINUTE - 60 * ago, "mail", "app.send"): counts(succeeded=1) for ago in range(-5, 10)})
    span = NOON - timedelta(minutes=8), NOON + timedelta(minutes=5)
    for names in ({}, {"task_path": "app.send"}):
        found = series("default", *span, timedelta(minutes=5), **names)
        assert [(point.started_at.minute, point.counts.succeeded) for point in found] == [(50, 4), (55, 5), (0, 5)]


def test_steps_of_whole_hours_read_hours_which_are_kept_longer():
    add_numbers("default", {(MINUTE, "mail", "app.send"): counts(succeeded=1)})
    Number.objects.filter(seconds=60).delete()
    day = series("default", NOON - timedelta(hours=12), NOON + timedelta(hours=6), timedelta(hours=6))
    assert [point.counts.succeeded for point in day] == [0, 0, 1]


@pytest.mark.parametrize("step", [0, 59, 61, 0.5, -60])
def test_a_step_is_a_whole_number_of_minutes(step):
    with pytest.raises(ValueError, match="whole number of minutes"):
        series("default", NOON, NOON + timedelta(hours=1), step)


def test_dates_are_naive_without_use_tz(settings):
    add_numbers("default", {(MINUTE, "mail", "app.send"): counts(succeeded=1)})
    settings.USE_TZ = False
    since = datetime.fromtimestamp(MINUTE)
    found = series("default", since, since + timedelta(minutes=1), 60)
    assert [(point.started_at, point.counts.succeeded) for point in found] == [(since, 1)]
    assert len(totals("default", since, since + timedelta(minutes=1))) == 1


@pytest.mark.parametrize("span", [timedelta(hours=1), timedelta(days=1)])
def test_totals_by_function_and_by_queue(span):
    add_numbers(
        "default",
        {
            (MINUTE, "mail", "app.send"): counts(succeeded=2, run=1.0),
            (MINUTE + 60, "mail", "app.send"): counts(failed=3, run=64.0),
            (MINUTE, "mail", "app.open"): counts(succeeded=1, run=1.0),
            (MINUTE, "bulk", "app.send"): counts(succeeded=9),
        },
    )
    found = totals("default", NOON, NOON + span)
    assert [(each.queue, each.task_path, each.counts.attempts) for each in found] == [
        ("bulk", "app.send", 9),
        ("mail", "app.send", 5),
        ("mail", "app.open", 1),
    ]
    assert (found[1].counts.failed, found[1].counts.run_seconds) == (3, 194.0)
    assert found[1].counts.run_quantile(1) == pytest.approx(64, rel=0.42)
    assert found[1].counts.run_quantile(0.2) == pytest.approx(1, rel=0.42)
    assert totals("default", NOON + span, NOON + 2 * span) == totals("default", NOON - span, NOON) == []


def test_totals_of_up_to_three_hours_are_of_minutes_and_of_more_of_whole_hours():
    add_numbers("default", {(MINUTE, "mail", "app.send"): counts(succeeded=1)})
    since = NOON + timedelta(minutes=30)
    assert totals("default", since, since + timedelta(hours=3)) == []
    assert len(totals("default", since, since + timedelta(hours=3, seconds=1))) == 1


def test_old_rows_are_deleted_minutes_before_hours():
    now = datetime.now(timezone.utc).timestamp() // 3600 * 3600
    for age in (0, KEPT[60] - 3600, KEPT[60] + 3600, KEPT[3600] + 7200):
        add_numbers("default", {(int(now - age), "mail", "app.send"): counts(succeeded=1)})
    while prune_numbers("default", batch=2):
        pass
    left = Number.objects.filter(task_path="app.send", kind="succeeded")
    assert (left.filter(seconds=60).count(), left.filter(seconds=3600).count()) == (2, 3)
    assert not Number.objects.filter(seconds=3600, started_at__lt=NOON - timedelta(days=95)).exists()


def test_the_rate_of_a_queue_is_the_average_of_the_last_minutes_that_all_workers_have_written(
    monkeypatch, django_assert_num_queries
):
    """A worker writes a minute up to a minute after its end, so the newest two would make each queue look slower."""
    now = datetime(2026, 1, 5, 12, 0, 30, tzinfo=timezone.utc)
    monkeypatch.setattr(numbers, "now", lambda: now)
    counts = {"succeeded": 1, "failed": 20, "cancelled": 300, "retried": 4000, "lost": 50_000}
    for ago in range(10):
        started = now - timedelta(minutes=ago, seconds=30)
        for kind, count in counts.items():
            row = {"started_at": started, "kind": kind, "total": 0, "buckets": []}
            mine = count * (2 <= ago < 7)
            Number.objects.create(seconds=60, queue="mail", task_path=ALL, count=mine, **row)
            Number.objects.create(seconds=60, queue="other", task_path=ALL, count=count, **row)
            Number.objects.create(seconds=60, queue="mail", task_path="of.one.function", count=count, **row)
            Number.objects.create(seconds=3600, queue="mail", task_path=ALL, count=count, **row)
    with django_assert_num_queries(1):
        assert finished_per_minute("default", ["mail", "quiet"]) == {"mail": 321}


def make_due():
    """Let the next reader count: the last count was made long ago."""
    Number.objects.filter(kind="counted").update(total=0)


def test_depths_are_counted_when_nobody_has_counted_lately():
    tasks.nothing.enqueue()
    [earlier] = depths("default")
    assert earlier.counts == {"READY": 1, "BLOCKED": 0, "SCHEDULED": 0, "RUNNING": 0, "FAILED": 0}
    tasks.nothing.enqueue()
    assert depths("default") == [earlier], "the last count is young"
    make_due()
    assert depths("default")[0].counts["READY"] == 2


def test_after_a_step_of_the_clock_depths_are_counted_again():
    assert depths("default") == []
    tasks.nothing.enqueue()
    Number.objects.filter(kind="counted").update(total=F("total") + 300)
    assert depths("default")[0].counts["READY"] == 1


def test_a_later_count_replaces_each_number_of_an_earlier_one():
    tasks.nothing.enqueue()
    [earlier] = depths("default")
    wanted = {"READY": 5, "BLOCKED": 4, "SCHEDULED": 3, "RUNNING": 2, "FAILED": 1}
    for status, count in wanted.items():
        for _ in range(count - (status == "READY")):
            make(status, queue="default")
    Queue.objects.pause("default")
    make_due()
    [later] = depths("default")
    assert later.counts == wanted
    assert later.paused_at is not None
    assert later.oldest_ready >= earlier.oldest_ready
    Task.objects.update(queue="new")
    Queue.objects.resume("default")
    make_due()
    assert [(each.queue, each.counts) for each in depths("default")] == [("new", wanted)]


def test_a_depth_that_reached_the_limit_may_be_more(monkeypatch):
    monkeypatch.setattr("django_pglock.store.count.MOST_COUNTED", 2)
    for _ in range(2):
        tasks.nothing.enqueue()
    [found] = depths("default")
    assert found.at_least == {"READY"}


def test_known_queues_are_those_of_depths_and_attempts_without_those_that_have_a_row():
    for queue in ("mail", "paused"):
        make("READY", queue=queue)
    Queue.objects.pause("paused")
    add_numbers("default", {(MINUTE, name, "app.send"): counts(succeeded=1) for name in ("done", "mail", "zip")})
    assert queues_without_row("default", also=["default", "mail", "paused"]) == ["default", "done", "mail", "zip"]
