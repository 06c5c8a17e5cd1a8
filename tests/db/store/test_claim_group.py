"""A worker that has claimed one task of a group claims the others with it."""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import timedelta

import pytest
from django.db import OperationalError, connection, transaction
from django.db.models.functions import Now

from django_pglock.models import Task
from django_pglock.store.claim import claim_group
from tests.conftest import NEVER
from tests.db.store.endings import statuses
from tests.sample import keyed_tasks as keyed

pytestmark = pytest.mark.django_db(transaction=True)


def enqueue(*texts, task=keyed.digest, user=1):
    return [task.enqueue(text=text, user=user) for text in texts]


def enqueue_notes(*texts, author="anna", task=keyed.note):
    return [task.enqueue(order_id=1, author=author, text=text) for text in texts]


#: Each of the two statements.
alone_and_at_a_lock_key = pytest.mark.parametrize("add", [enqueue, enqueue_notes], ids=["alone", "at a lock key"])


def test_the_members_of_a_group_are_claimed_for_its_worker_in_order(claim):
    """Each claim counts an attempt, because the number of attempts is the fencing token."""
    enqueue(*"abc")
    [first] = claim()
    others = claim_group("default", first, limit=10, gather=0)
    assert [each.id for each in others] == list(Task.objects.order_by("id").values_list("pk", flat=True))[1:]
    assert {(each.worker, each.attempt) for each in others} == {(first.worker, 1)}
    for row in Task.objects.all():
        assert (row.status, row.attempts, row.worker) == ("RUNNING", 1, first.worker)
        assert row.started_at == row.last_attempted_at is not None
    assert claim_group("default", first, limit=10, gather=0) == []


@alone_and_at_a_lock_key
def test_a_task_with_the_largest_number_of_claims_is_taken_with_the_others(claim, add):
    """A plain INSERT may write this number. If the statement failed, no task of the group would be claimed."""
    ids = [int(result.id) for result in add(*"abc")]
    Task.objects.filter(pk=ids[1]).update(attempts=2**31 - 1)
    [first] = claim()
    assert [each.id for each in claim_group("default", first, limit=10, gather=0)] == ids[1:]


def test_the_oldest_are_taken_whether_they_wait_or_gather(claim):
    rows = enqueue(*"abc")
    [first] = claim()
    Task.objects.filter(pk=rows[1].id).update(status="SCHEDULED", run_after=Now())
    assert [str(each.id) for each in claim_group("default", first, limit=1, gather=30)] == [rows[1].id]


@pytest.mark.parametrize("status", ["BLOCKED", "SCHEDULED"])
@alone_and_at_a_lock_key
@pytest.mark.usefixtures("without_indexes")
def test_the_oldest_are_taken_whatever_the_plan(claim, add, status):
    rows = add(*"abc")
    [first] = claim()
    Task.objects.exclude(pk=first.id).update(status=status, run_after=Now())
    # A changed row is behind the others in the table.
    Task.objects.filter(pk=rows[1].id).update(run_after=Now())
    assert [str(each.id) for each in claim_group("default", first, limit=1, gather=30)] == [rows[1].id]


def test_a_group_takes_no_tasks_of_other_groups_functions_backends_and_queues(claim):
    """No worker may claim a task of a paused queue, and this worker may not serve the other queues."""
    enqueue("a")
    enqueue("of another user", user=2)
    enqueue("of another backend", "of another function", "of another queue")
    [first] = claim()
    Task.objects.filter(kwargs__text="of another backend").update(backend="other")
    Task.objects.filter(kwargs__text="of another function").update(task_path="other.task")
    Task.objects.filter(kwargs__text="of another queue").update(queue="other")
    assert claim_group("default", first, limit=10, gather=0) == []


def test_a_group_takes_gathering_tasks_and_no_tasks_due_later(claim):
    """A task that waits for its retry has begun before. It runs at the date of the retry."""
    rows = [int(each.id) for each in enqueue(*"abcdef")]
    [first] = claim()
    for id_, seconds in zip(rows[1:], (5, 60, 5, 5, 5), strict=True):
        Task.objects.filter(pk=id_).update(status="SCHEDULED", run_after=Now() + timedelta(seconds=seconds))
    Task.objects.filter(pk=rows[3]).update(started_at=Now())
    Task.objects.filter(pk=rows[4]).update(backend="other")
    Task.objects.filter(pk=rows[5]).update(queue="other")
    assert [each.id for each in claim_group("default", first, limit=10, gather=30)] == [rows[1]]


@alone_and_at_a_lock_key
def test_a_leader_that_lost_its_claim_takes_no_members(claim, add):
    """The worker of the first claim was frozen, and another worker may be claiming the group now."""
    add(*"abc")
    [first] = claim()
    Task.objects.filter(kwargs__text="c").update(status="SCHEDULED", run_after=Now())
    assert claim_group("default", replace(first, attempt=2), limit=10, gather=0) == []
    Task.objects.filter(pk=first.id).update(status="READY")
    assert claim_group("default", first, limit=10, gather=0) == []


@alone_and_at_a_lock_key
def test_a_claim_waits_for_a_transaction_that_changes_the_leader(claim, locked, add):
    """It may take the first task away from this worker. Then the worker must not take the others."""
    add(*"ab")
    [first] = claim()
    with locked(first.id), connection.cursor() as cursor:
        cursor.execute("SET lock_timeout = '50ms'")
        with pytest.raises(OperationalError, match="lock timeout"):
            claim_group("default", first, limit=10, gather=0)


@pytest.mark.parametrize("status", ["BLOCKED", "SCHEDULED"])
def test_a_group_skips_a_locked_row(claim, locked, status):
    rows = enqueue(*"abc")
    [first] = claim()
    Task.objects.exclude(pk=first.id).update(status=status, run_after=Now())
    with locked(rows[1].id):
        assert [str(each.id) for each in claim_group("default", first, limit=10, gather=0)] == [rows[2].id]


def take_notes(claim, limit=10):
    [first] = claim()
    return [
        Task.objects.get(pk=each.id).kwargs["text"] for each in claim_group("default", first, limit=limit, gather=0)
    ]


def test_a_group_with_a_lock_key_takes_the_next_tasks_up_to_the_limit(claim):
    enqueue_notes(*"abcd")
    assert take_notes(claim, limit=2) == ["b", "c"]
    assert statuses() == ["RUNNING", "RUNNING", "RUNNING", "BLOCKED"]


@pytest.mark.parametrize(
    "between",
    [
        lambda: keyed.step.enqueue(1),
        lambda: enqueue_notes("of another group", author="ben"),
        lambda: enqueue_notes("that waits for others", task=keyed.note.using(after=Task.objects.earliest("id").pk)),
        lambda: Task.objects.filter(pk=enqueue_notes("of another backend")[0].id).update(backend="other"),
        lambda: enqueue_notes("of another queue", task=keyed.note.using(queue_name="other")),
    ],
)
def test_a_group_takes_no_task_past_another_task_of_its_lock_key(claim, between):
    """Tasks of one lock key begin in the order in which they were enqueued."""
    enqueue_notes("a", "b")
    between()
    enqueue_notes("c")
    assert take_notes(claim) == ["b"]


def test_a_group_takes_no_task_past_a_locked_row_of_its_lock_key(claim, locked):
    rows = enqueue_notes(*"abcd")
    with locked(rows[2].id):
        assert take_notes(claim) == ["b"]


def test_a_group_takes_no_task_that_ends_while_the_statement_waits_for_its_leader(claim, in_threads, eventually):
    """The snapshot of the statement still shows the task as waiting."""
    _, second, _ = enqueue_notes(*"abc")
    [first] = claim()
    has_ended = threading.Event()

    def work(number):
        if number:
            assert has_ended.wait(NEVER)
            return claim_group("default", first, limit=10, gather=0)
        with transaction.atomic(), connection.cursor() as cursor:
            Task.objects.select_for_update().get(pk=first.id)
            Task.objects.filter(pk=second.id).update(status="CANCELLED", finished_at=Now())
            has_ended.set()
            eventually(lambda: cursor.execute("SELECT FROM pg_locks WHERE NOT granted").fetchall())
        return None

    assert in_threads(work, 2) == [None, []]
    assert Task.objects.get(pk=second.id).status == "CANCELLED"


def test_a_group_with_a_lock_key_takes_gathering_tasks_up_to_another_task(claim):
    later = keyed.note.using(run_after=timedelta(seconds=20))
    enqueue_notes("a")
    enqueue_notes("b", task=later)
    keyed.step.enqueue(1)
    enqueue_notes("c", task=later)
    [first] = claim()
    [other] = claim_group("default", first, limit=10, gather=30)
    assert Task.objects.get(pk=other.id).kwargs["text"] == "b"


def test_at_a_lock_key_those_that_gather_for_another_group_function_backend_or_queue_are_left_alone(claim):
    later = keyed.note.using(run_after=timedelta(seconds=20))
    enqueue_notes("a")
    enqueue_notes("of another group", author="ben", task=later)
    enqueue_notes("of another backend", "of another function", "of another queue", "that was begun", task=later)
    [first] = claim()
    for text, change in (
        ("of another backend", {"backend": "other"}),
        ("of another function", {"task_path": "other.task"}),
        ("of another queue", {"queue": "other"}),
        ("that was begun", {"started_at": Now()}),
    ):
        Task.objects.filter(kwargs__text=text).update(**change)
    assert claim_group("default", first, limit=10, gather=30) == []


@alone_and_at_a_lock_key
def test_a_claim_of_a_group_locks_no_row_of_another_key(claim, in_threads, add):
    add(*"ab")
    keyed.step.enqueue("other")
    other = int(keyed.step.enqueue("other").id)
    [first] = claim()
    with transaction.atomic():
        assert len(claim_group("default", first, limit=10, gather=0)) == 1

        def lock_other(_):
            with transaction.atomic():
                return Task.objects.select_for_update(nowait=True).get(pk=other).pk

        assert in_threads(lock_other, 1) == [other]
