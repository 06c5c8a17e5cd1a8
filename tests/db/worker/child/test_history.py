"""The settler counts each settled attempt once for the history, whatever its outcome."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from uuid import uuid4

import pytest

from django_pglock.models import Number, Task
from django_pglock.postgres.sessions import dedicated_connection
from django_pglock.store.numbers import OUTCOMES, add_numbers, series
from django_pglock.store.outcome import Abandoned, Cancelled, Failure, GivenBack, Succeeded
from django_pglock.tasks.claim import Claim
from django_pglock.worker.child.in_flight import EndedClaim
from django_pglock.worker.child.settler import waited
from tests.sample import keyed_tasks, tasks

pytestmark = pytest.mark.django_db(transaction=True)


def history(**chosen):
    """Return the numbers of the last hour that are not zero, and how many waits and run times there are."""
    now = datetime.now(timezone.utc)
    points = series("default", now - timedelta(minutes=59), now + timedelta(minutes=2), 60, **chosen)
    numbers = {name: sum(getattr(point.counts, name) for point in points) for name in OUTCOMES}
    waits, runs = (sum(sum(getattr(point.counts, name)) for point in points) for name in ("wait", "run"))
    return {name: number for name, number in numbers.items() if number}, waits, runs


CALLS = {
    "success": (lambda: tasks.nothing.enqueue(), {"succeeded": 1}, 1, 1),
    "failure": (lambda: tasks.fail.enqueue(), {"failed": 1}, 1, 1),
    # For a task that runs again at once, the time since which it was ready is not recorded.
    "retries": (lambda: tasks.fail_twice.enqueue("x"), {"retried": 2, "succeeded": 1}, 1, 3),
    "a later retry": (lambda: tasks.say.enqueue("retry", after=0.01), {"retried": 1, "succeeded": 1}, 2, 2),
    "snooze": (lambda: tasks.say.enqueue("snooze"), {"snoozed": 1, "succeeded": 1}, 2, 2),
    "cancel": (lambda: tasks.say.enqueue("cancel"), {"cancelled": 1}, 1, 1),
    "own transaction": (lambda: tasks.record_atomically.enqueue("x"), {"succeeded": 1}, 1, 1),
    "coroutine": (lambda: tasks.sleep_async.enqueue(0), {"succeeded": 1}, 1, 1),
    "group": (lambda: [keyed_tasks.digest.enqueue(user=1, text=n) for n in range(3)], {"succeeded": 3}, 3, 3),
}


@pytest.mark.parametrize("call", CALLS)
def test_each_attempt_counts_once_by_its_outcome(worker, eventually, call):
    enqueue, *expected = CALLS[call]
    enqueue()
    running = worker()
    eventually(lambda: not Task.objects.filter(finished_at=None).exists())
    running.shutdown()
    assert list(history()) == expected
    [path] = set(Task.objects.values_list("task_path", flat=True))
    assert list(history(queue="default", task_path=path)) == expected


def test_a_claim_that_was_lost_or_given_back_counts_nothing(worker, claim, eventually):
    running = worker(queues=["another"])
    # A feeder that connects gives back what it does not know.
    eventually(lambda: running.feeder.is_claiming)
    for _ in range(4):
        tasks.nothing.enqueue()
    lost, given_back, never_begun, abandoned = claim(4, worker=running.id)
    Task.objects.filter(pk=lost.id).delete()
    for each, outcome in (
        (lost, Succeeded()),
        (given_back, GivenBack()),
        (never_begun, Cancelled(Failure("x", "y"))),
        (abandoned, Abandoned(3600.0)),
    ):
        running.in_flight.add([each])
        running.in_flight.end(EndedClaim(each, outcome))
    eventually(lambda: not running.in_flight.claims)
    running.shutdown()
    assert history() == ({"cancelled": 1, "lost": 1}, 0, 0)


def test_a_history_that_cannot_be_written_delays_no_outcome_and_is_written_later(
    worker, eventually, caplog, monkeypatch
):
    """A migration may have locked the table."""
    ended = []

    def add(*args):
        try:
            return add_numbers(*args)
        finally:
            ended.append(1)

    monkeypatch.setattr("django_pglock.worker.child.settler.add_numbers", add)
    running, other = worker(), dedicated_connection("default")
    counted = running.settler.history

    def write(number):
        tasks.nothing.enqueue()
        eventually(lambda: not Task.objects.filter(finished_at=None).exists())
        eventually(lambda: counted.due_in() < math.inf)
        counted._write_at = 0.0
        running.settler.wake()
        eventually(lambda: len(ended) == number)

    try:
        with other.cursor() as cursor:
            cursor.execute("BEGIN")
            cursor.execute("LOCK TABLE django_pglock_number IN EXCLUSIVE MODE")
        write(1)
        write(2)
    finally:
        other.close()
    assert not Number.objects.filter(task_path=tasks.nothing.module_path).exists()
    write(3)
    eventually(lambda: counted.due_in() == math.inf)
    assert history()[0] == {"succeeded": 3}
    texts = [record.message for record in caplog.records if "numbers" in record.message]
    assert texts == ["The numbers of tasks cannot be written. The worker tries again in a minute."] * 2
    assert running.settler.reconnects == 0


def ended(**changes):
    claim = Claim(
        1, 1, uuid4(), "default", "mail", 0, "app.send", "[]", "{}", "{}", 0, 0, 0, None, "100", None, "110.0"
    )
    return EndedClaim(replace(claim, **changes), Succeeded(), seconds=2.0)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 10.0),
        ({"run_after": "107"}, 3.0),
        ({"run_after": "50"}, 10.0),
        # Longer, but earlier.
        ({"run_after": "50.5"}, 10.0),
        # Run early, by hand.
        ({"run_after": "500"}, 0.0),
        # Given back before: its first start is this one.
        ({"attempt": 2}, 10.0),
        ({"attempt": 2, "started_at": "105"}, None),
        ({"attempt": 2, "started_at": "105", "run_after": "107.5"}, 2.5),
    ],
)
def test_a_task_has_waited_since_it_was_due(changes, expected):
    assert waited(ended(**changes).claim) == expected
