"""The settler: outcomes that are refused, locked or lost do not delay or lose the others."""

from __future__ import annotations

import time

import pytest
from django.db import connection, transaction

from django_pglock.models import Task
from django_pglock.store.outcome import Failed, Failure, Succeeded
from django_pglock.store.wake import channel_of
from django_pglock.worker.child import settler
from django_pglock.worker.child.executor import Executor
from django_pglock.worker.child.in_flight import EndedClaim
from tests.sample import tasks
from tests.sql import execute_sql

pytestmark = pytest.mark.django_db(transaction=True)


FAILED = Failed(Failure("builtins.ValueError", "Traceback …"))


@pytest.fixture
def in_flight(worker, claim, eventually):
    """Start a worker that has so many claims in flight, but runs nothing."""

    def start(count):
        running = worker(queues=["another"])
        # Before that, the feeder gives unknown claims back.
        eventually(lambda: running.feeder.is_claiming)
        for _ in range(count):
            tasks.nothing.enqueue()
        # The claims belong to this worker, because its upkeep would rescue those of a missing worker.
        claims = claim(count, worker=running.id)
        for each in claims:
            running.in_flight.claims[each.id, each.attempt] = each
        return running, claims

    return start


@pytest.mark.parametrize(
    ("text", "error"), [("{no json", "DataError"), ("[" * 10**5 + "]" * 10**5, "OperationalError")]
)
def test_an_outcome_that_the_database_refuses_fails_only_its_own_task(in_flight, eventually, text, error):
    """A row that cannot be stored must not delay its batch, and must not lose its own outcome."""
    running, claims = in_flight(9)
    refused = claims[4]
    for each in claims:
        running.in_flight.outbox.put(EndedClaim(each, Succeeded(text if each is refused else "1")))
    eventually(lambda: not running.in_flight.claims)
    assert set(Task.objects.exclude(pk=refused.id).values_list("status", flat=True)) == {"SUCCESSFUL"}
    row = Task.objects.get(pk=refused.id)
    assert row.status == "FAILED"
    assert row.failures.get().exception_path == f"django.db.utils.{error}"
    assert running.settler.reconnects == 0


def test_large_results_are_written_a_few_at_a_time(in_flight, eventually, monkeypatch):
    monkeypatch.setattr("django_pglock.worker.child.settler.LARGEST_TEXT", 200)
    settle, sizes = settler.settle, []
    monkeypatch.setattr(settler, "settle", lambda *args: (sizes.append(len(args[1])), settle(*args))[1])
    running, claims = in_flight(9)
    for each in claims:
        running.in_flight.outbox.put(EndedClaim(each, Succeeded(f'"{"x" * 90}"')))
    eventually(lambda: not running.in_flight.claims)
    assert (max(sizes), sum(sizes)) == (2, 9)
    assert set(Task.objects.values_list("status", flat=True)) == {"SUCCESSFUL"}


@pytest.mark.parametrize("tells", [False, True])
@pytest.mark.parametrize("outcome", [Succeeded(), FAILED], ids=["success", "failure"])
def test_a_locked_row_does_not_delay_other_outcomes(in_flight, eventually, locked, outcome, tells):
    """As by a cancel in a long transaction. The last progress of the task is written with its outcome."""
    running, claims = in_flight(6)
    held, *others = claims
    held.progress = '{"done": 9}' if tells else None
    with locked(held.id):
        for each in claims:
            running.in_flight.outbox.put(EndedClaim(each, FAILED if each is claims[5] else outcome))
        eventually(lambda: list(running.in_flight.claims.values()) == [held])
        assert not Task.objects.filter(pk__in=[each.id for each in others], status="RUNNING").exists()
        # To give it up when the worker ends comes too late: it has ended.
        running.in_flight.abandon([held], 60)
        time.sleep(0.3)
        assert running.in_flight.unsettled == 1, "what is held waits for nothing else"
        assert Task.objects.get(pk=held.id).status == "RUNNING"
    eventually(lambda: not running.in_flight.claims)
    row = Task.objects.get(pk=held.id)
    assert (row.status, row.progress) == (outcome.status, {"done": 9} if tells else None)
    assert (running.settler.reconnects, running.settler.lost) == (0, 0)


def test_a_claim_that_is_lost_while_its_row_is_locked_is_lost(in_flight, eventually, in_threads):
    running, [mine] = in_flight(1)

    def take_away(_):
        with transaction.atomic():
            Task.objects.filter(pk=mine.id).update(attempts=mine.attempt + 1)
            running.in_flight.outbox.put(EndedClaim(mine, Succeeded()))
            eventually(lambda: running.settler._locked)

    in_threads(take_away, 1)
    eventually(lambda: not running.in_flight.claims)
    assert running.settler.lost == 1
    assert Task.objects.get().status == "RUNNING"


def test_an_outcome_that_the_table_refuses_for_now_is_kept(in_flight, eventually, refusing, monkeypatch):
    """Before, the success of a function became a failure because a trigger on our table raised for a moment."""
    monkeypatch.setattr(settler, "BETWEEN_REFUSALS", 0.05)
    running, claims = in_flight(3)
    refused = claims[1]
    refusing("P0001", f"NEW.id = {refused.id}")
    for each in claims:
        running.in_flight.outbox.put(EndedClaim(each, Succeeded("1")))
    eventually(lambda: len(running.in_flight.claims) == 1, why="it delays the others")
    assert Task.objects.get(pk=refused.id).status == "RUNNING"
    refusing.stop()
    eventually(lambda: not running.in_flight.claims)
    assert list(Task.objects.values_list("status", "result")) == [("SUCCESSFUL", 1)] * 3


def test_a_worker_that_ends_logs_locked_rows(in_flight, eventually, locked, caplog, monkeypatch):
    monkeypatch.setattr("django_pglock.worker.child.child.LAST_WRITES", 0.5)
    running, [mine] = in_flight(1)
    with locked(mine.id):
        running.in_flight.outbox.put(EndedClaim(mine, Succeeded()))
        eventually(lambda: running.settler._locked)
        running.shutdown()
    assert f"Task {mine.id} ({mine.task_path}) attempt 1 of 1 has ended, but its row is locked" in caplog.text


def test_the_next_task_of_a_key_wakes_its_own_worker_without_a_notification(worker, eventually):
    """A notification would be one more commit for each task of the key, before the next one begins."""
    running = worker()
    eventually(lambda: running.feeder.asks)
    execute_sql(f"LISTEN {channel_of(running.crew.id)}")
    notes = []
    connection.connection.add_notify_handler(notes.append)
    with transaction.atomic():
        for _ in range(9):
            tasks.nothing.using(lock="same").enqueue()
    eventually(lambda: Task.objects.filter(status="SUCCESSFUL").count() == 9)
    eventually(lambda: Task.objects.exists() and notes)
    # If the first task ends quickly, the enqueueing process may admit the second one after its commit, and notify.
    assert len(notes) in (1, 2), "of the first task, and perhaps of the second"
    assert running.feeder.asks, "it waited for notifications all the time"


def test_a_task_is_given_up_only_when_the_outcomes_of_others_are_written(
    in_flight, eventually, locked, in_threads, monkeypatch
):
    """When it runs elsewhere, seconds later, this process must have ended, and must not still wait for a locked row."""
    running, [mine, busy] = in_flight(2)
    child = running.child
    child.grace = 0.1
    # As if a thread ran the second task.
    monkeypatch.setattr(Executor, "is_idle", False)

    def stop(_):
        with locked(mine.id):
            running.in_flight.outbox.put(EndedClaim(mine, Succeeded()))
            eventually(lambda: running.settler._locked)
            running.stop()
            eventually(lambda: 0 < child._ends_at < time.monotonic() - 0.5)
            return Task.objects.get(pk=busy.id).status

    assert in_threads(stop, 1) == ["RUNNING"]
    eventually(Task.objects.filter(pk=mine.id, status="SUCCESSFUL").exists)
    eventually(Task.objects.filter(pk=busy.id, status="SCHEDULED").exists)
