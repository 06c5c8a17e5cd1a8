"""Rates: a number of starts in a period."""

from __future__ import annotations

import time
from contextlib import closing
from datetime import timedelta
from functools import partial
from uuid import uuid4

import pytest
from django.db import OperationalError, connection, transaction
from django.db.models import F
from django.db.models.functions import Now

from django_pglock.models import RateLimit, Task
from django_pglock.postgres.sessions import dedicated_connection
from django_pglock.store import enqueue as module
from django_pglock.store import rate, wake
from django_pglock.store.admit import admit
from django_pglock.store.enqueue import admit_one
from django_pglock.store.outcome import Succeeded
from django_pglock.store.rate import delete_unused_rates, open_rates
from django_pglock.store.settle import settle
from django_pglock.tasks.options import Rate
from django_pglock.worker.child.claimer import ALL, Claimer
from django_pglock.worker.queues import Queues
from tests import server_clock
from tests.conftest import NEVER
from tests.db.store.endings import statuses
from tests.db.store.workers import add_sleeping_worker
from tests.sample import keyed_tasks as keyed
from tests.sql import execute_sql

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize("rate", ["5/s", "21/s", Rate(6, per=1, burst=3)])
def test_no_second_has_more_starts_than_the_rate_says(rate):
    """Measured by the dates in the database. A tick late or two early, and a provider who counts answers 429.

    One thread admits and claims, so no task starts later than when it is admitted, however slow the machine is.
    """
    rated = keyed.drip.using(rate=rate)
    most = rated.rate.count + rated.rate.burst - 1
    for number in range(most + 4):
        rated.enqueue(number)
    worker = uuid4()
    claimer = Claimer("default", worker, Queues([]))
    left = most + 4
    while left:
        admit("default", open_rates("default"))
        claims = claimer.claim(ALL, 8)
        settle("default", [(each, Succeeded()) for each in claims], worker)
        left -= len(claims)
        time.sleep(0.002)
    starts = list(Task.objects.order_by("started_at").values_list("started_at", flat=True))
    second = timedelta(seconds=1)
    assert max(sum(start <= each < start + second for each in starts) for start in starts) <= most


def test_a_rate_admits_a_burst_and_then_waits_for_the_next_token():
    for _ in range(4):
        keyed.trickle.enqueue(1)
    keyed.trickle.enqueue(2)
    assert statuses() == ["READY", "READY", "BLOCKED", "BLOCKED", "READY"]
    limit = RateLimit.objects.get(key="%rate tenant:1")
    assert abs(limit.arrives_at - limit.opens_at - timedelta(seconds=720)) < timedelta(milliseconds=1)
    assert RateLimit.objects.get(key="%rate tenant:2").opens_at is None


def test_a_sleeping_worker_is_notified_of_the_first_call_that_waits_for_a_token():
    """The worker then schedules a check. Without it, the next round of upkeep would find the token."""
    add_sleeping_worker()
    told = []
    with closing(dedicated_connection("default")) as listener, listener.cursor() as cursor:
        cursor.execute(f"LISTEN {wake.SCHEDULED_CHANNEL}")
        for number in range(4):
            wake._no_worker_slept_at.clear()
            keyed.trickle.enqueue(1)
            cursor.execute("SELECT pg_notify(%s, %s)", [wake.SCHEDULED_CHANNEL, f"call {number}"])
        for note in listener.connection.notifies(timeout=NEVER):
            told.append(note.payload)
            if note.payload == "call 3":
                break
    assert told == ["call 0", "call 1", "", "call 2", "call 3"]


def test_a_token_admits_the_first_waiting_task_and_not_a_new_one(claim):
    """The token is due, and no worker has polled yet."""
    for _ in range(3):
        keyed.trickle.enqueue(1)
    claim(2)
    RateLimit.objects.update(arrives_at=Now() + timedelta(seconds=720), opens_at=Now())
    keyed.trickle.enqueue(1)
    assert statuses() == ["RUNNING", "RUNNING", "READY", "BLOCKED"]


@pytest.mark.usefixtures("without_indexes")
def test_a_token_admits_the_first_waiting_task_whatever_the_plan(claim):
    waiting = [keyed.trickle.enqueue(1).id for _ in range(4)][2:]
    claim(2)
    # A changed row is behind the others in the table.
    Task.objects.filter(pk=waiting[0]).update(priority=1)
    RateLimit.objects.update(arrives_at=Now() + timedelta(seconds=720))
    assert admit("default", ["%rate tenant:1"]) == 1
    assert [Task.objects.get(pk=id_).status for id_ in waiting] == ["READY", "BLOCKED"]
    claim()
    RateLimit.objects.update(arrives_at=Now())
    assert admit("default", ["%rate tenant:1"]) == 1
    assert RateLimit.objects.get().opens_at is None, "no other task waits for a token"


def test_unclaimed_tasks_count_against_the_burst():
    """Tokens must not accumulate while the workers are busy or stopped."""
    for _ in range(2):
        keyed.trickle.enqueue(1)
    RateLimit.objects.update(arrives_at=Now() - timedelta(days=1))
    with transaction.atomic():
        keyed.trickle.enqueue(1)
    assert Task.objects.latest("id").status == "BLOCKED"
    for _ in range(2):
        keyed.trickle.enqueue(1)
    execute_sql("UPDATE django_pglock_ratelimit SET arrives_at = now() - interval '1 day', opens_at = now()")
    admit("default", open_rates("default"))
    assert Task.objects.filter(status="READY").count() == 2
    assert execute_sql("SELECT opens_at > now() + interval '0.5 s' FROM django_pglock_ratelimit")[0][0], (
        "for one that nobody begins there is a look a second, not twenty"
    )
    Task.objects.filter(status="READY").update(status="SUCCESSFUL", finished_at="2026-01-01T00:00Z")
    admit("default", ["%rate tenant:1"])
    assert Task.objects.filter(status="READY").count() == 2


@pytest.mark.parametrize("later", ["waiting", "enqueued"])
@pytest.mark.parametrize(("wait", "burst"), [(60, 3), (3600, 3), (60, 1), (5, 3)])
def test_after_a_pause_of_the_workers_no_more_than_a_burst_starts_at_once(wait, burst, later):
    """The tokens of the tasks that were READY count from their start: the bucket had refilled behind them."""
    task = keyed.trickle.using(rate=Rate(6, per=60, key="tenant:{tenant}", burst=burst))
    for _ in range(burst if later == "enqueued" else 8):
        task.enqueue(1)
    RateLimit.objects.update(
        arrives_at=F("arrives_at") - timedelta(seconds=wait), opens_at=F("opens_at") - timedelta(seconds=wait)
    )
    worker = uuid4()
    claimer = Claimer("default", worker, Queues([]))
    claims = claimer.claim(ALL, 8)
    assert len(claims) == burst
    settle("default", [(each, Succeeded()) for each in claims], worker)
    for _ in range(8 if later == "enqueued" else 0):
        task.enqueue(1)
    admit("default", [claims[0].lock_key])
    assert claimer.claim(ALL, 8) == []


def test_tasks_that_are_still_ready_keep_their_tokens_when_others_of_their_key_start(claim):
    """Of three that have waited for an hour one starts now. The bucket has to be empty for the other two."""
    task = keyed.trickle.using(rate=Rate(6, per=60, key="tenant:{tenant}", burst=3))
    for _ in range(8):
        task.enqueue(1)
    RateLimit.objects.update(arrives_at=Now() - timedelta(hours=1))
    rate.note_starts("default", claim())
    assert admit("default", ["%rate tenant:1"]) == 0
    rate.note_starts("default", claim(2))
    assert admit("default", ["%rate tenant:1"]) == 0


def test_an_admission_right_after_a_claim_counts_its_start(claim):
    """The worker has not written it into the bucket yet."""
    task = keyed.trickle.using(rate=Rate(1, per=60, key="tenant:{tenant}"))
    for _ in range(2):
        task.enqueue(1)
    RateLimit.objects.update(arrives_at=Now() - timedelta(hours=1))
    claim()
    assert admit("default", ["%rate tenant:1"]) == 0


@pytest.mark.parametrize("meta", [{"of": {"rate": 1}}, {"rate": None}, {"rate": 5}])
def test_the_start_of_a_row_with_another_rate_in_its_meta_is_left_alone(claim, meta):
    keyed.trickle.enqueue(1)
    Task.objects.update(meta=meta)
    rate.note_starts("default", claim())


@pytest.mark.parametrize("late", [3600, 0])
@pytest.mark.parametrize("burst", [1, 2])
def test_a_late_admission_delays_the_next_one(late, burst):
    """The next interval counts from the admission. From the date of the token, too many would start in one period."""
    interval, limit = 100, Rate(1, per=100, key="tenant:{tenant}", burst=burst)
    for _ in range(burst + 2):
        keyed.trickle.using(rate=limit).enqueue(1)
    Task.objects.filter(status="READY").update(status="SUCCESSFUL", finished_at=Now())
    RateLimit.objects.update(arrives_at=Now() - timedelta(seconds=late))
    before = server_time()
    assert admit("default", ["%rate tenant:1"]) == burst
    counted_from = RateLimit.objects.get().arrives_at - timedelta(seconds=interval * burst)
    assert before <= counted_from <= server_time()


def server_time():
    return execute_sql("SELECT clock_timestamp()")[0][0]


def test_a_rate_limits_also_tasks_with_a_lock_key(claim):
    """The task has a lock key and a rate, and both limits hold."""
    task = keyed.step.using(rate=Rate(1, per=3600))
    for _ in range(2):
        task.enqueue(1)
    settle("default", [(mine := claim()[0], Succeeded())], mine.worker)
    admit("default", [mine.lock_key])
    assert statuses() == ["SUCCESSFUL", "BLOCKED"]
    assert RateLimit.objects.get().opens_at is not None


@pytest.mark.usefixtures("without_indexes")
def test_the_buckets_whose_tokens_have_come_first_are_opened_first(in_threads):
    for tenant in range(3):
        RateLimit.objects.create(
            key=f"%rate tenant:{tenant}", arrives_at=Now(), opens_at=Now() - timedelta(seconds=tenant)
        )
    with transaction.atomic():
        RateLimit.objects.select_for_update().get(key="%rate tenant:2")
        assert in_threads(lambda _: open_rates("default", limit=1), 1) == [["%rate tenant:1"]], "it waits for no row"
    assert [open_rates("default", limit=1) for _ in range(3)] == [["%rate tenant:2"], ["%rate tenant:0"], []]


def test_buckets_that_are_unused_for_a_day_are_deleted(in_threads):
    for tenant in range(5):
        keyed.trickle.enqueue(tenant)
    for _ in range(2):
        keyed.trickle.enqueue(4)
    RateLimit.objects.exclude(key="%rate tenant:0").update(arrives_at=Now() - timedelta(days=2))
    with transaction.atomic():
        RateLimit.objects.select_for_update().get(key="%rate tenant:1")
        assert in_threads(lambda number: delete_unused_rates("default", ""), 1) == [(2, "")]
    assert sorted(RateLimit.objects.values_list("key", flat=True)) == [f"%rate tenant:{n}" for n in (0, 1, 4)]
    assert delete_unused_rates("default", "") == (1, "")
    keyed.trickle.enqueue(1)
    assert RateLimit.objects.filter(key="%rate tenant:1").exists()


def test_a_task_that_is_cancelled_while_it_is_admitted_stays_cancelled_and_takes_no_token(
    session, in_threads, eventually, monkeypatch
):
    """Admission waits for the row for a moment. The test lets it wait for as long as it takes."""
    monkeypatch.setattr(module, "_OWN", module._OWN.replace("100ms", f"{NEVER:.0f}s"))
    with transaction.atomic():
        task = int(keyed.trickle.enqueue(1).id)
        transaction.get_connection().run_on_commit.clear()
    session.ensure_connection()
    ask = session.connection.execute
    ask("BEGIN")
    ask("UPDATE django_pglock_task SET status = 'CANCELLED', finished_at = now()")

    def act(number):
        if number == 0:
            return admit_one("default", keyed.trickle, task, "%rate tenant:1")
        waiting = "SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'transactionid' AND NOT granted)"
        eventually(lambda: ask(waiting).fetchone()[0], why="admission does not wait")
        return ask("COMMIT").statusmessage

    assert in_threads(act, 2) == [None, "COMMIT"]
    assert Task.objects.get().status == "CANCELLED"
    assert not RateLimit.objects.exists()


@pytest.mark.parametrize("function", [keyed.trickle, keyed.step], ids=["rate", "lock"])
def test_an_admission_after_the_commit_does_not_wait_for_a_locked_row(locked, function):
    """It waits for 100 ms. Other errors of the database are raised."""
    with transaction.atomic():
        task = int(function.enqueue(1).id)
        transaction.get_connection().run_on_commit.clear()

    admit = partial(admit_one, "default", function, task, Task.objects.get().lock_key)
    with locked(task):
        admit()
        assert Task.objects.get().status == "BLOCKED"
        with connection.cursor() as cursor:
            cursor.execute("SET statement_timeout = '50ms'")
            with pytest.raises(OperationalError, match="statement timeout"):
                admit()
            cursor.execute("RESET statement_timeout")
    admit()
    assert Task.objects.get().status == "READY"
    assert execute_sql("SHOW lock_timeout")[0] == ("0",)


def test_sixteen_enqueuers_take_no_token_twice(in_threads):
    in_threads(lambda number: keyed.trickle.enqueue(1), 16)
    assert Task.objects.filter(status="READY").count() == 2


def test_no_call_waits_longer_than_an_empty_bucket_although_the_clock_was_put_back():
    """A token is never further away than the burst, also if a task of the key has run since before the step."""
    rated = keyed.drip.using(rate=Rate(60, per=60, burst=2))
    for number in range(3):
        rated.enqueue(number)
    Task.objects.filter(status="READY").update(status="RUNNING", last_attempted_at=Now(), worker=uuid4(), attempts=1)
    server_clock.put_back(300)
    rated.enqueue(3)
    [key] = RateLimit.objects.values_list("key", flat=True)
    # As upkeep does for all keys at which tasks wait.
    admit("default", [key])
    bucket = RateLimit.objects.annotate(now=Now()).get()
    assert bucket.opens_at - bucket.now <= timedelta(seconds=1)
    assert bucket.arrives_at - bucket.now <= timedelta(seconds=2)
