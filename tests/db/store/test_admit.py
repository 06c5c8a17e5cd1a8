"""Keys of tasks: one at a time and in order, with concurrency, and how blocked tasks are admitted."""

from __future__ import annotations

import math
from contextlib import contextmanager
from datetime import timedelta
from uuid import uuid4

import pytest
from django.db import transaction
from django.db.models.functions import Now
from django.utils import timezone

from django_pglock import Rate
from django_pglock.models import RateLimit, Task
from django_pglock.postgres.sessions import dedicated_connection
from django_pglock.store import admit as admit_module
from django_pglock.store import enqueue as enqueue_module
from django_pglock.store.admit import ADMIT, LOCK_KEYS, admit, blocked_keys, holders
from django_pglock.store.outcome import Abandoned, Failed, GivenBack, Retried, Snoozed, Succeeded
from django_pglock.store.rescue import rescue
from django_pglock.store.settle import settle
from django_pglock.store.statements import filled
from tests.db.store.endings import FAILURE, statuses
from tests.sample import keyed_tasks as keyed
from tests.sample import tasks
from tests.sample.models import Effect
from tests.sql import execute_sql

pytestmark = pytest.mark.django_db(transaction=True)


def settle_one(claim, outcome):
    accepted = settle("default", [(claim, outcome)], claim.worker)
    admit("default", [claim.lock_key])
    return accepted


@contextmanager
def hold_key(key):
    """Hold the lock of admission to a key, in another session."""
    holder = dedicated_connection("default")
    try:
        with holder.cursor() as cursor:
            cursor.execute(filled(LOCK_KEYS).replace("_xact", ""), [[key]])
        yield holder.connection
    finally:
        holder.close()


def test_one_task_of_a_key_is_admitted_and_the_next_after_its_end(claim):
    for number in range(3):
        keyed.step.enqueue(1, number)
    assert statuses() == ["READY", "BLOCKED", "BLOCKED"]
    [first] = claim(3)
    assert settle_one(first, Succeeded())
    assert statuses() == ["SUCCESSFUL", "READY", "BLOCKED"]


@pytest.mark.parametrize("function", [keyed.step, keyed.trickle], ids=["lock", "rate"])
def test_workers_are_woken_for_a_task_that_is_admitted_after_the_commit(monkeypatch, function):
    woken = []
    monkeypatch.setattr(enqueue_module, "wake", lambda using, queues: woken.extend(queues))
    with transaction.atomic():
        function.using(queue_name="mail").enqueue(1)
    assert (statuses(), woken) == (["READY"], ["mail"])


def test_a_task_with_something_left_to_wait_for_does_not_keep_those_behind_it_waiting(claim):
    """One of the two tasks that it waits for has ended, and this is not recorded yet."""
    keyed.step.enqueue(1)
    ended, other = tasks.echo.enqueue(1), tasks.echo.enqueue(2)
    keyed.step.using(after=[ended, other]).enqueue(1)
    keyed.step.enqueue(1)
    claims = claim(2)
    settle("default", [(each, Succeeded()) for each in claims], claims[0].worker)
    admit("default", ["order:1"])
    assert statuses() == ["SUCCESSFUL", "SUCCESSFUL", "READY", "BLOCKED", "READY"]


@pytest.mark.parametrize(("seconds", "pause"), [(9, 0.9), (86_400, 1.0)])
def test_the_next_look_for_a_task_that_no_worker_begins_is_after_a_tenth_of_its_wait_or_a_second(seconds, pause):
    def now():
        return execute_sql("SELECT clock_timestamp()")[0][0]

    for _ in range(3):
        keyed.trickle.enqueue(1)
    before = now()
    RateLimit.objects.update(arrives_at=before - timedelta(seconds=seconds), opens_at=before)
    admit("default", ["%rate tenant:1"])
    opens_at = RateLimit.objects.get().opens_at
    assert before + timedelta(seconds=pause) <= opens_at <= now() + timedelta(seconds=1)


def test_no_token_is_taken_for_a_task_that_is_cancelled_meanwhile(session, in_threads, eventually, monkeypatch):
    """Here admission pauses between its snapshot and the lock on the row."""
    with transaction.atomic():
        result = keyed.trickle.enqueue(1)
        transaction.get_connection().run_on_commit.clear()
    pause = "CROSS JOIN (SELECT pg_advisory_xact_lock(1)) AS pause"
    pausing = ADMIT.replace("ARRAY(SELECT id FROM next)", f"ARRAY(SELECT id FROM next {pause})")
    monkeypatch.setattr(admit_module, "ADMIT", pausing)
    waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    session.ensure_connection()
    session.connection.execute("SELECT pg_advisory_lock(1)")

    def act(number):
        if number == 0:
            return admit("default", ["%rate tenant:1"])
        eventually(lambda: session.connection.execute(waiting).fetchone() == (1,), why="admission does not pause")
        Task.objects.filter(pk=result.id).update(status="CANCELLED", finished_at=Now())
        session.connection.execute("SELECT pg_advisory_unlock(1)")

    assert in_threads(act, 2) == [0, None]
    assert RateLimit.objects.get().arrives_at <= timezone.now()


@pytest.mark.parametrize(
    ("outcome", "after"),
    [
        (Retried(FAILURE, 60), ["SCHEDULED", "BLOCKED"]),  # the update waits for all attempts of the create
        (Snoozed(60), ["SCHEDULED", "BLOCKED"]),
        (Abandoned(60), ["SCHEDULED", "BLOCKED"]),  # it still runs, in a process that ends
        (Retried(FAILURE, 0), ["READY", "BLOCKED"]),
        (GivenBack(), ["READY", "BLOCKED"]),
        (Failed(FAILURE), ["FAILED", "READY"]),
    ],
)
def test_a_started_task_keeps_its_lock_key_until_it_has_finished(claim, outcome, after):
    keyed.step.enqueue(1)
    keyed.step.enqueue(1)
    [mine] = claim()
    settle_one(mine, outcome)
    assert statuses() == after


def test_with_concurrency_a_task_that_waits_for_its_retry_frees_its_slot(claim):
    for _ in range(4):
        keyed.call.enqueue("bank")
    assert statuses() == ["READY"] * 3 + ["BLOCKED"]
    settle_one(claim()[0], Retried(FAILURE, 60))
    assert statuses() == ["SCHEDULED", "READY", "READY", "READY"]


def test_a_task_is_admitted_only_within_the_limits_of_the_running_ones(claim):
    """Functions may share a key and differ in how many may run at once: one that writes, and many that read."""
    writer, reader = keyed.step, keyed.step.using(concurrency=3)
    for each in (writer, reader, reader, writer, reader):
        each.enqueue(1)
    assert statuses() == ["READY", "BLOCKED", "BLOCKED", "BLOCKED", "BLOCKED"]
    [first] = claim()
    admit("default", [first.lock_key])
    assert statuses()[1:] == ["BLOCKED", "BLOCKED", "BLOCKED", "BLOCKED"]
    settle_one(first, Succeeded())
    assert statuses()[1:] == ["READY", "READY", "BLOCKED", "BLOCKED"], "not the third that reads: it came later"
    for each in claim(2):
        assert statuses()[3] == "BLOCKED"
        settle_one(each, Succeeded())
    assert statuses()[3:] == ["READY", "BLOCKED"]


def test_the_smallest_concurrency_of_the_running_tasks_is_the_limit(claim):
    for concurrency in (3, 2, 3, 1):
        keyed.step.using(concurrency=concurrency).enqueue(1)
    assert statuses() == ["READY", "READY", "BLOCKED", "BLOCKED"]
    for outcome in (Retried(FAILURE, 60), Retried(FAILURE, 60), Succeeded()):
        settle_one(claim()[0], outcome)
    assert statuses() == ["SCHEDULED", "SCHEDULED", "SUCCESSFUL", "BLOCKED"]


def test_a_key_that_also_has_a_rate_is_still_one_at_a_time(claim):
    task = keyed.fail_first.using(rate=Rate(100, per=1, burst=10))
    for _ in range(3):
        task.enqueue(1)
    assert statuses() == ["READY", "BLOCKED", "BLOCKED"]
    [first] = claim()
    admit("default", [first.lock_key])
    assert statuses()[1:] == ["BLOCKED", "BLOCKED"]
    settle_one(first, Retried(FAILURE, 60))
    assert statuses() == ["SCHEDULED", "BLOCKED", "BLOCKED"], "it keeps its turn"


def test_a_locked_row_blocks_only_its_key(in_threads):
    """As when a user cancels a task, or a call replaces one, in a long transaction."""
    with transaction.atomic():
        for order in (1, 1, 2):
            keyed.step.enqueue(order)

        def admit_all(number):
            return admit("default", ["order:1", "order:2"])

        transaction.get_connection().run_on_commit.clear()  # as after a crash right after the commit
    with transaction.atomic():
        Task.objects.select_for_update().earliest("id")
        assert in_threads(admit_all, 2).count(1) == 1
        assert statuses() == ["BLOCKED", "BLOCKED", "READY"]
    assert admit_all(0) == 1
    assert statuses() == ["READY", "BLOCKED", "READY"]


def test_a_locked_row_blocks_later_tasks_of_its_key_also_with_concurrency(in_threads):
    """Tasks of a key run in the order in which they were enqueued. The task of the other key is admitted."""
    with transaction.atomic():
        for name in ("a", "a", "a", "b"):
            keyed.call.enqueue(name)
        transaction.get_connection().run_on_commit.clear()
    with transaction.atomic():
        Task.objects.select_for_update().get(pk=Task.objects.order_by("id")[1].pk)
        assert in_threads(lambda number: admit("default", ["api:a", "api:b"]), 1) == [2]
        assert statuses() == ["READY", "BLOCKED", "BLOCKED", "READY"]
    assert admit("default", ["api:a"]) == 2


def test_admission_sees_concurrent_admissions_at_every_isolation_level(in_threads, eventually):
    """With one snapshot for both statements, older than the lock, a second task would be admitted."""
    with transaction.atomic():
        for order in (1, 2, 2):
            keyed.step.enqueue(order)
        transaction.get_connection().run_on_commit.clear()
    waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    with hold_key("order:1") as holder:

        def admit_one(number):
            if number == 0:
                execute_sql("SET default_transaction_isolation = 'repeatable read'")
                return admit("default", ["order:1", "order:2"])
            eventually(lambda: holder.execute(waiting).fetchone()[0], why="nobody waits")
            count = admit("default", ["order:2"])
            holder.execute("SELECT pg_advisory_unlock_all()")
            return count

        assert in_threads(admit_one, 2) == [1, 1]
    assert statuses() == ["READY", "READY", "BLOCKED"]


@pytest.mark.parametrize("verb", ["cancel", "retry"])
def test_manual_verbs_respect_the_lock_key(claim, verb):
    first = keyed.step.enqueue(1)
    keyed.step.using(run_after=timedelta(hours=1)).enqueue(1)
    third = keyed.step.enqueue(1)
    if verb == "cancel":
        assert Task.objects.filter(pk=first.id).cancel() == 1
        assert statuses() == ["CANCELLED", "SCHEDULED", "READY"]
    else:
        Task.objects.filter(pk=third.id).cancel()
        assert Task.objects.filter(pk=third.id).retry() == 1
        assert statuses() == ["READY", "SCHEDULED", "BLOCKED"]


def test_a_rescue_keeps_the_order(claim):
    keyed.step.enqueue(1)
    keyed.step.enqueue(1)
    dead = uuid4()
    claim(1, worker=dead)
    assert [each.status for each in rescue("default", unbroken=math.inf)] == ["BLOCKED"]
    assert statuses() == ["READY", "BLOCKED"]


def test_upkeep_admits_tasks_after_a_crash_between_commit_and_admission(monkeypatch):
    """In other queues such a task stays blocked forever. Upkeep searches key by key, and continues where it stopped."""
    for order in range(5):
        keyed.step.enqueue(order)
    Task.objects.update(status="BLOCKED")
    first = blocked_keys("default", "", limit=3)
    rest = blocked_keys("default", first[-1], limit=3)
    assert (len(first), len(rest)) == (3, 2)
    told, admit_some = [], admit_module._admit
    monkeypatch.setattr(admit_module, "KEYS_AT_ONCE", 2)
    monkeypatch.setattr(admit_module, "_admit", lambda using, keys: told.append(keys) or admit_some(using, keys))
    monkeypatch.setattr(admit_module, "wake", lambda using, queues: told.append(queues))
    assert admit("default", [*first, *rest]) == 5
    assert told == [first[:2], [first[2], rest[0]], rest[1:], ["default"] * 5]
    assert set(statuses()) == {"READY"}


def test_tasks_of_one_key_run_one_after_another_in_their_order(worker, eventually):
    worker(threads=4)
    keyed.fail_first.enqueue(7)
    for number in range(20):
        keyed.step.enqueue(7, number)
    eventually(lambda: statuses() == ["SUCCESSFUL"] * 21)
    events = list(Effect.objects.order_by("pk").values_list("name", "number"))
    assert events[0] == ("begin 7", -1), "its first attempt, whose effect remains"
    expected = [(f"{what} 7", number) for number in range(-1, 20) for what in ("begin", "end")]
    assert events[1:] == expected


def test_no_more_tasks_of_a_key_run_at_once_than_its_concurrency(worker, eventually):
    worker(threads=8)
    for _ in range(30):
        keyed.call.enqueue("bank", 0.05)
    eventually(lambda: statuses() == ["SUCCESSFUL"] * 30)
    inside, most = 0, 0
    for name in Effect.objects.order_by("pk").values_list("name", flat=True):
        inside += 1 if name.startswith("begin") else -1
        most = max(most, inside)
    assert most == 3


def test_keys_at_which_tasks_wait_are_returned_in_order_each_once():
    for order in (3, 1, 2, 2, 1):
        keyed.step.enqueue(order)
    assert blocked_keys("default", "") == ["order:1", "order:2"], "no task waits at the third"
    assert blocked_keys("default", "", limit=1) == ["order:1"]
    assert blocked_keys("default", "order:1") == ["order:2"]
    assert blocked_keys("default", "order:2") == []


def test_a_key_is_held_by_tasks_that_are_admitted_or_will_be_retried():
    first, *_ = (int(keyed.step.enqueue(1).id) for _ in range(3))
    assert holders("default", "order:1", limit=5) == [first]
    later = int(keyed.step.using(run_after=timedelta(hours=1)).enqueue(1).id)
    assert holders("default", "order:1", limit=5) == [first], "one that has never run holds no key"
    Task.objects.filter(pk=later).update(started_at="2026-01-01T00:00Z")
    assert holders("default", "order:1", limit=5) == [first, later]
    assert holders("default", "order:1", limit=1) == [first]
    Task.objects.filter(pk=first).update(status="SCHEDULED", started_at=Now(), run_after=Now())
    Task.objects.filter(pk=later).update(status="READY")
    assert holders("default", "order:1", limit=5) == [first, later], "by id, and not by status"
    assert holders("default", "order:2", limit=5) == []
