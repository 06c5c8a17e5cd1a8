"""Settling: one guarded statement for a batch, and no change for a worker that has lost the claim."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta

import pytest
from django.db import DataError, OperationalError, connection, transaction
from django.db.models.functions import Now
from django.db.transaction import TransactionManagementError
from django.test.utils import CaptureQueriesContext

from django_pglock.errors import ClaimLost
from django_pglock.models import Attempt, Task
from django_pglock.store.outcome import (
    Abandoned,
    Failed,
    GivenBack,
    Interrupted,
    Retried,
    Snoozed,
    Succeeded,
)
from django_pglock.store.settle import finish_dates, locked_by_others, settle, settle_and_commit, settle_unobserved
from django_pglock.tasks.states import TaskStatus
from tests.db.store.endings import FAILURE
from tests.db.store.workers import register
from tests.sample import tasks
from tests.sql import execute_sql

pytestmark = pytest.mark.django_db

MINUTE = timedelta(minutes=1)


def settle_one(claim, outcome):
    return settle("default", [(claim, outcome)], claim.worker)


@pytest.mark.parametrize("results", [["null"] * 3, ["null", "7", '{"a": 1}']], ids=["none", "some"])
def test_unobserved_successes_are_written_alike_and_answered_in_one_row(claim, results):
    for _ in range(3):
        tasks.nothing.using(keep_result=60).enqueue()
    claims = claim(3)
    with CaptureQueriesContext(connection) as queries:
        # In any order.
        assert settle_unobserved("default", claims[::-1], results[::-1]) is None
    assert len(queries) == 1
    rows = Task.objects.order_by("id")
    assert [row.result for row in rows] == [None if text == "null" else json.loads(text) for text in results]
    for row in rows:
        assert row.status == "SUCCESSFUL"
        assert abs(row.expires_at - row.finished_at - MINUTE) < timedelta(seconds=1)


@pytest.mark.parametrize("is_observed", [True, False])
def test_each_task_of_a_batch_gets_its_own_result_whatever_is_in_the_others(claim, is_observed):
    texts = [
        "null",
        '"null"',
        '"100% {} %s $1 \\\\ \'"',
        '"\\ud83d\\ude00"',
        "[]",
        '{"a": [1, null]}',
        "[" * 50 + "]" * 50,
        "0",
    ]
    for _ in texts:
        tasks.nothing.enqueue()
    claims = claim(len(texts))[::-1]
    if is_observed:
        settle("default", [*zip(claims, map(Succeeded, texts), strict=True)], claims[0].worker)
    else:
        settle_unobserved("default", claims, texts)
    found = dict(Task.objects.values_list("pk", "result"))
    assert [found[mine.id] for mine in claims] == list(map(json.loads, texts))


def test_unobserved_successes_have_no_effect_on_a_lost_claim(claim):
    for _ in range(3):
        tasks.nothing.enqueue()
    first, second, third = claim(3)
    Task.objects.filter(pk=second.id).update(attempts=second.attempt + 1)
    assert sorted(settle_unobserved("default", [first, second, third], ["1"] * 3)) == [first.id, third.id]
    assert Task.objects.get(pk=second.id).status == "RUNNING"
    assert settle_unobserved("default", [first, third], ["2"] * 2) == [], "each is settled once"
    assert set(Task.objects.filter(status="SUCCESSFUL").values_list("result", flat=True)) == {1}


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("is_observed", [True, False])
def test_of_two_attempts_of_one_task_in_a_batch_the_later_one_counts(claim, is_observed, is_first):
    """A frozen worker may continue and settle its lost attempt in the same batch as the next attempt."""
    tasks.nothing.enqueue()
    tasks.nothing.enqueue()
    other, mine = claim(2)
    Task.objects.filter(pk=mine.id).update(attempts=mine.attempt + 1)
    late, now = (mine, "1"), (replace(mine, attempt=mine.attempt + 1), "2")
    claims, results = zip((other, "3"), *((late, now) if is_first else (now, late)), strict=True)
    if is_observed:
        accepted = settle("default", [*zip(claims, map(Succeeded, results), strict=True)], mine.worker)
    else:
        accepted = settle_unobserved("default", claims, results)
    assert sorted(accepted) == [other.id, mine.id]
    assert list(Task.objects.order_by("id").values_list("status", "result")) == [("SUCCESSFUL", 3), ("SUCCESSFUL", 2)]


@pytest.mark.parametrize(
    ("outcome", "status", "record"),
    [
        (Succeeded('{"a": 1}'), "SUCCESSFUL", None),
        (Failed(FAILURE), "FAILED", "FAILED"),
        (Retried(FAILURE, 60), "SCHEDULED", "FAILED"),
        (Retried(FAILURE, 0.5), "SCHEDULED", "FAILED"),
        (Retried(FAILURE, 0), "READY", "FAILED"),
        (Interrupted(FAILURE, 60), "SCHEDULED", "LOST"),
        (GivenBack(), "READY", None),
        (Abandoned(60), "SCHEDULED", None),
    ],
)
def test_settle_writes_the_status_and_the_attempt_of_each_outcome(claim, outcome, status, record):
    tasks.nothing.using(keep_result=60).enqueue()
    [mine] = claim()
    assert mine.id in settle_one(mine, outcome)
    row = Task.objects.get()
    is_finished = status in ("SUCCESSFUL", "FAILED")
    assert row.status == status
    assert (row.finished_at is not None) == is_finished
    assert (row.expires_at is not None) == is_finished
    assert (row.started_at is None) == isinstance(outcome, GivenBack)
    if is_finished:
        assert abs(row.expires_at - row.finished_at - MINUTE) < timedelta(seconds=1)
    if status == "SCHEDULED":
        assert row.run_after >= row.last_attempted_at + timedelta(seconds=outcome.delay)
    assert (row.worker is None) == (status in ("READY", "SCHEDULED"))
    assert row.retries == isinstance(outcome, Retried)
    assert row.rescues == 0, "only the death of a worker is one"
    assert row.meta == {}
    assert row.uncounted == isinstance(outcome, (GivenBack, Abandoned))
    assert [attempt.outcome for attempt in Attempt.objects.all()] == ([record] if record else [])
    if status == "SUCCESSFUL":
        assert row.result == {"a": 1}
    if record:
        attempt = Attempt.objects.get()
        assert (attempt.number, attempt.worker, attempt.exception_path) == (1, mine.worker, "builtins.ValueError")


def test_only_limited_snoozes_are_counted_in_the_row(claim):
    tasks.nothing.using(meta={"trace": "abc"}).enqueue()
    settle_one(claim()[0], Snoozed(0))
    assert Task.objects.get().meta == {"trace": "abc"}
    settle_one(claim()[0], Snoozed(0, snoozes=1))
    assert Task.objects.get().meta == {"trace": "abc", "snoozes": 1}


def test_a_claim_of_a_task_with_the_largest_numbers_is_given_back(claim):
    tasks.nothing.enqueue()
    Task.objects.update(attempts=2**31 - 1, uncounted=2**31 - 1)
    settle_one(claim()[0], GivenBack())
    row = Task.objects.get()
    assert (row.status, row.attempts, row.uncounted) == ("READY", 2**31 - 1, 2**31 - 1)


def test_a_claim_given_back_unused_leaves_the_start_of_an_earlier_attempt(claim):
    tasks.nothing.enqueue()
    settle_one(claim()[0], Retried(FAILURE, 0))
    started_at = Task.objects.get().started_at
    settle_one(claim()[0], GivenBack())
    assert Task.objects.get().started_at == started_at is not None


@pytest.mark.parametrize(
    "outcome", [Succeeded(), Failed(FAILURE), Retried(FAILURE, 1), Interrupted(FAILURE, 0), GivenBack()]
)
def test_a_late_outcome_of_a_rescued_task_changes_nothing(claim, outcome):
    """The fence: a worker that returns after a rescue finds another attempt in the row."""
    tasks.nothing.enqueue()
    [zombie] = claim()
    settle_one(zombie, Interrupted(FAILURE, 0))
    [new] = claim()
    before = Task.objects.values().get()
    attempts = Attempt.objects.count()
    assert settle_one(zombie, outcome) == {}
    assert Task.objects.values().get() == before
    assert Attempt.objects.count() == attempts
    assert new.id in settle_one(new, Succeeded())


def test_a_deleted_task_does_not_disturb_its_batch(claim):
    for _ in range(3):
        tasks.nothing.enqueue()
    first, second, third = claim(3)
    Task.objects.filter(pk=second.id).delete()
    accepted = settle("default", [(each, Succeeded()) for each in (first, second, third)], first.worker)
    assert set(accepted) == {first.id, third.id}


def test_a_batch_is_one_statement_per_kind(claim):
    for _ in range(6):
        tasks.nothing.enqueue()
    claims = claim(6)
    outcomes = [Succeeded(), Failed(FAILURE), Retried(FAILURE, 1), Succeeded(), GivenBack(), Interrupted(FAILURE, 0)]
    with CaptureQueriesContext(connection) as queries:
        accepted = settle("default", list(zip(claims, outcomes, strict=True)), claims[0].worker)
    assert (len(queries), len(accepted)) == (2, 6)


@pytest.mark.parametrize("kept", [("mail-1", "a"), (None, None)])
def test_an_attempt_keeps_the_name_of_its_worker_and_its_log(claim, kept):
    """The row of a worker is deleted when the worker ends."""
    tasks.nothing.enqueue()
    [mine] = claim()
    if any(kept):
        register(mine.worker, name="mail-1")
        mine.log = "a"
    settle_one(mine, Failed(FAILURE))
    assert Attempt.objects.values_list("worker", "worker_name", "log").get() == (mine.worker, *kept)


@pytest.mark.django_db(transaction=True)
def test_held_returns_only_claims_with_locked_rows(claim, locked):
    for _ in range(3):
        tasks.nothing.enqueue()
    free, mine, lost = claim(3)
    with locked(mine.id), locked(lost.id):
        assert locked_by_others("default", [free, mine]) == {mine.id}
        assert locked_by_others("default", [replace(mine, attempt=2)]) == set(), "another attempt has the row"
    Task.objects.filter(pk=lost.id).update(status=TaskStatus.FAILED, finished_at=Now())
    with locked(lost.id):
        assert locked_by_others("default", [lost]) == set(), "it runs no more"
    assert locked_by_others("default", [free, mine, lost]) == set()
    assert locked_by_others("default", [free]) == set()
    with locked(free.id):
        assert locked_by_others("default", [free]) == {free.id}
    assert settle_one(mine, Succeeded()), "nothing stays locked"


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("outcome", [Succeeded(), Failed(FAILURE)], ids=["success", "failure"])
def test_a_locked_row_holds_up_a_batch_for_a_moment_only_and_the_session_keeps_its_limit(claim, locked, outcome):
    tasks.nothing.enqueue()
    [mine] = claim()
    with locked(mine.id), pytest.raises(OperationalError):
        settle_one(mine, outcome)
    assert settle_one(mine, outcome)
    assert execute_sql("SHOW lock_timeout")[0] == ("0",)


def test_the_dates_of_tasks_that_have_finished_are_read(claim):
    for _ in range(3):
        tasks.nothing.enqueue()
    first, second, third = claim(3)
    accepted = settle("default", [(first, Succeeded()), (second, Succeeded())], first.worker)
    assert finish_dates("default", [first.id, third.id]) == {first.id: accepted[first.id]}


@pytest.mark.django_db(transaction=True)
def test_successes_are_written_with_the_transaction_of_their_function(claim):
    for _ in range(3):
        tasks.nothing.enqueue()
    first, second, other = claim(3)
    with transaction.atomic():
        [begun] = execute_sql("SELECT clock_timestamp()")[0]
        with CaptureQueriesContext(connection) as sent:
            settle_and_commit("default", [(second, Succeeded('{"a": 1}')), (first, Succeeded("null"))])
        assert "".join(each["sql"] for each in sent).count("UPDATE") == 1, "one statement for all claims of a group"
    rows = {row.pk: row for row in Task.objects.all()}
    assert [rows[each.id].status for each in (first, second, other)] == ["SUCCESSFUL", "SUCCESSFUL", "RUNNING"]
    assert [rows[each.id].result for each in (first, second)] == [None, {"a": 1}]
    assert rows[first.id].finished_at > begun, "it ends when the function ends, not when the transaction begins"
    assert execute_sql("SELECT count(*) FROM django_pglock_task WHERE result IS NULL")[0] == (2,), (
        "a JSON null takes place"
    )


@pytest.mark.django_db(transaction=True)
def test_with_a_lost_claim_nothing_is_committed(claim):
    tasks.nothing.enqueue()
    tasks.nothing.enqueue()
    mine, lost = claim(2)
    lost = replace(lost, attempt=lost.attempt + 1)
    with pytest.raises(ClaimLost, match="no longer claimed by this attempt"), transaction.atomic():
        Task.objects.filter(pk=mine.id).update(priority=7)
        settle_and_commit("default", [(mine, Succeeded()), (lost, Succeeded())])
    assert set(Task.objects.values_list("status", "priority")) == {("RUNNING", 0)}


@pytest.mark.django_db(transaction=True)
def test_settle_and_commit_raises_the_error_of_a_failed_commit(claim):
    tasks.nothing.enqueue()
    [mine] = claim()
    with pytest.raises(TransactionManagementError), transaction.atomic():
        transaction.set_rollback(True)
        settle_and_commit("default", [(mine, Succeeded())])
    with pytest.raises(DataError, match="type json"), transaction.atomic():
        settle_and_commit("default", [(mine, Succeeded("no JSON"))])
    assert Task.objects.get().status == "RUNNING"
