"""A worker and its queues: which it serves, and in which order."""

from __future__ import annotations

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_pglock import enqueue_many
from django_pglock.models import Task, Worker
from django_pglock.tasks.queues import OWN_QUEUE
from django_pglock.worker.child.claimer import ALL, FEW_QUEUES, LONGEST_LIFETIME
from tests.db.store.fair_claims import claims_of, tenants
from tests.db.worker.conftest import make_feeder
from tests.sample import keyed_tasks as keyed
from tests.sample import tasks
from tests.sample.models import Effect
from tests.sql import execute_sql

pytestmark = pytest.mark.django_db(transaction=True)


def fill(queue, count):
    for number in range(count):
        tasks.record.using(queue_name=queue).enqueue(queue, number)


@pytest.fixture
def one_by_one(monkeypatch):
    """Let a worker with one thread claim one task at a time, so that each claim statement takes one task."""
    monkeypatch.setattr("django_pglock.worker.child.in_flight.PREFETCH_TIME", 0)


def in_order():
    return list(Effect.objects.order_by("id").values_list("name", flat=True))


def test_a_queue_is_polled_when_the_earlier_ones_are_empty(worker, eventually, one_by_one):
    fill("low", 5)
    fill("mail-b", 5)
    fill("mail-a", 5)
    fill("high", 20)
    worker(queues=["high", "mail*", "low"], threads=1)
    eventually(lambda: Effect.objects.count() == 35)
    assert in_order() == ["high"] * 20 + ["mail-a", "mail-b"] * 5 + ["low"] * 5


def test_prefixes_and_exclusions_hold_for_claims_and_for_notifications(worker, eventually):
    running = worker(queues=["mail*"], exclude=["mail-bulk*"])
    for queue in ("mail-bulk", "mail-bulk-2", "other", "mail", "mail-a"):
        fill(queue, 1)
    eventually(lambda: Effect.objects.count() == 2)
    fill("mail-b", 1)
    eventually(lambda: Effect.objects.count() == 3)
    assert sorted(in_order()) == ["mail", "mail-a", "mail-b"]
    assert set(Task.objects.filter(status="READY").values_list("queue", flat=True)) == {
        "mail-bulk",
        "mail-bulk-2",
        "other",
    }
    assert Worker.objects.get(pk=running.id).queues == ["mail*", "--exclude mail-bulk*"]


@pytest.mark.parametrize(
    ("queue", "wakes"), [("mail-a", True), (OWN_QUEUE, True), ("mail-bulk", False), ("other", False)]
)
def test_only_notifications_of_a_served_queue_wake_the_worker(queue, wakes):
    silent = make_feeder(names=["mail*"], exclude=["mail-bulk"])
    silent.in_flight.notify_feeder(queue)
    assert silent.in_flight.feeder_wakeup.is_set() is wakes


def test_cached_names_of_ready_queues_delay_no_task(monkeypatch):
    """The cache contains only one ready queue, which is empty by now."""
    claimer = make_feeder().claimer
    monkeypatch.setattr("django_pglock.worker.child.claimer.LIFETIME_FACTOR", 10**9)
    fill("a", 2)
    assert [claim.queue for claim in claimer.claim(ALL, 2)] == ["a", "a"]
    fill("b", 1)
    assert [claim.queue for claim in claimer.claim(ALL, 2)] == ["b"]
    fill("a", 1)
    assert [claim.queue for claim in claimer.claim(ALL, 2)] == ["a"], "there was less than was asked for: forgotten"


def test_turns_of_keys_continue_however_many_queues_are_ready(monkeypatch):
    monkeypatch.setattr("django_pglock.worker.child.claimer.FEW_QUEUES", 1)
    for queue in "abcd":
        enqueue_many(keyed.serve.using(queue_name=queue), [{"tenant": tenant} for tenant in "xxyy"])
    claimer = make_feeder().claimer
    claims = [claim for _ in range(8) for claim in claimer.claim(ALL, 1)]
    turns = {(claim.queue, tenant) for claim, tenant in zip(claims, tenants(claims), strict=True)}
    assert len(turns) == 8, "each queue has served both tenants"


def test_many_queues_share_one_prepared_claim_statement(in_threads):
    """Prepared statements use memory of the server while the worker lives, and cursors memory of the worker."""
    tenants = [f"tenant {number}" for number in range(FEW_QUEUES + 20)]
    for tenant in tenants:
        fill(tenant, 1)

    def claim_all(_):
        feeder = make_feeder()
        feeder.open()
        while feeder.claimer.claim(ALL, 7):
            pass
        fill("the last", 1)
        assert len(feeder.claimer.claim(ALL, 7)) == 1
        [prepared] = execute_sql("SELECT count(*) FROM pg_prepared_statements")[0]
        return prepared, len(feeder.claimer._cursors[ALL].queues)

    [(prepared, remembered)] = in_threads(claim_all, 1)
    assert not Task.objects.exclude(status="RUNNING").exists()
    assert prepared <= 4, "the queues that are ready, their claims, claims from a place on, and those with fair="
    assert remembered <= FEW_QUEUES


# Claims from one queue: turns between tasks with ``fair=`` and others, and a cursor behind the last claim.


def test_claims_ignore_priority_between_fair_and_other_tasks():
    enqueue_many(keyed.serve.using(priority=100), [{"tenant": "a"}] * 20)
    enqueue_many(tasks.nothing.using(priority=-100), [{}] * 20)
    claims = claims_of()
    got = [tenant for _ in range(10) for tenant in tenants(claims.claim(1))]
    assert (got.count("a"), got.count(None)) == (5, 5)


@pytest.mark.parametrize("seconds", [0.0, 60.0], ids=["quick", "long"])
def test_a_call_with_fair_gets_its_turn_if_no_function_has_fair(monkeypatch, seconds):
    """Otherwise the call would wait while any other task is ready, whatever its priority is."""
    now = [0.0]
    enqueue_many(tasks.nothing.using(fair="tenant", priority=-100), [{}] * 5)
    enqueue_many(tasks.nothing, [{}] * 100)
    claimer, got = make_feeder().claimer, []
    monkeypatch.setattr(claimer, "_clock", lambda: now[0])
    for _ in range(10):
        got += tenants(claimer.claim(ALL, 1))
        now[0] += seconds
    assert got.count("tenant") == 5


def test_a_worker_claims_fair_tasks_if_no_others_are_ready():
    """Also if it was notified, and does not know that they have ``fair=``."""
    enqueue_many(keyed.serve, [{"tenant": "a"}] * 3)
    assert len(claims_of().claim(10, has_fair=False)) == 3


def test_fair_tasks_that_this_worker_may_not_run_are_not_searched_at_each_claim(monkeypatch):
    monkeypatch.setattr("django_pglock.worker.child.claimer.LIFETIME_FACTOR", 10**9)
    enqueue_many(tasks.echo.using(fair="{value}"), [{"value": number} for number in range(9)])
    enqueue_many(tasks.nothing, [{}] * 9)
    claims = claims_of()
    assert len(claims.claim(1)) == 1
    with CaptureQueriesContext(connection) as queries:
        assert len(claims.claim(1)) == 1
    assert "fair_key IS NOT NULL" not in str(queries.captured_queries)


def test_a_claim_begins_where_the_one_before_it_ended():
    """Dead entries before that place are not read. After a second at most, a claim reads from the start again."""
    now = [0.0]
    for _ in range(9):
        tasks.nothing.enqueue()
    ids = list(Task.objects.order_by("pk").values_list("pk", flat=True))
    claims = claims_of(clock=lambda: now[0])
    assert [each.id for each in claims.claim(3, has_fair=False)] == ids[:3]
    claims._valid_until = LONGEST_LIFETIME  # by this clock the first claim took no time
    urgent = tasks.nothing.using(priority=50).enqueue()
    assert claims.shared.behind, "which is compiled now, and not within the claim"
    with CaptureQueriesContext(connection) as queries:
        assert [each.id for each in claims.claim(3, has_fair=False)] == ids[3:6]
    assert len(queries) == 1
    assert f"task.id > {ids[2]}" in queries[0]["sql"]
    now[0] += LONGEST_LIFETIME
    assert str(claims.claim(1, has_fair=False)[0].id) == urgent.id
