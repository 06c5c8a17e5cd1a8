"""Claims from one queue: turns between tasks with ``fair=`` and others, and a cursor behind the last claim."""

from __future__ import annotations

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_pglock import enqueue_many
from django_pglock.models import Task
from django_pglock.worker.child.claimer import LONGEST_LIFETIME
from tests.db.store.fair_claims import claims_of, tenants
from tests.sample import keyed_tasks as keyed
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)


def test_claims_ignore_priority_between_fair_and_other_tasks():
    enqueue_many(keyed.serve.using(priority=100), [{"tenant": "a"}] * 20)
    enqueue_many(tasks.nothing.using(priority=-100), [{}] * 20)
    claims = claims_of()
    got = [tenant for _ in range(10) for tenant in tenants(claims.claim(1))]
    assert (got.count("a"), got.count(None)) == (5, 5)


def test_a_call_with_fair_gets_its_turn_if_no_function_has_fair():
    """Otherwise the call would wait while any other task is ready, whatever its priority is."""
    now = [0.0]
    enqueue_many(tasks.nothing.using(fair="tenant", priority=100), [{}] * 5)
    enqueue_many(tasks.nothing, [{}] * 100)
    claims = claims_of(is_fair=False, clock=lambda: now[0])
    claims.claim(1)
    now[0] += 1.1
    got = [tenant for _ in range(11) for tenant in tenants(claims.claim(1))]
    assert got.count("tenant") == 5


def test_fair_tasks_are_claimed_beside_a_backlog_of_long_tasks():
    """Each claim takes one task, because only one thread is free. The next claim comes a minute later."""
    now = [0.0]
    enqueue_many(tasks.nothing, [{}] * 20)
    enqueue_many(keyed.serve, [{"tenant": "a"}] * 3)
    claims = claims_of(is_fair=False, clock=lambda: now[0])
    got = []
    for _ in range(4):
        got += tenants(claims.claim(1))
        now[0] += 60.0
    assert got == [None, "a", None, "a"]


def test_fair_tasks_and_other_tasks_of_a_queue_are_claimed_equally_often():
    enqueue_many(keyed.serve, [{"tenant": "a"}] * 100)
    enqueue_many(tasks.nothing, [{}] * 100)
    claims = claims_of()
    got = [tenant for _ in range(10) for tenant in tenants(claims.claim(1))]
    assert (got.count("a"), got.count(None)) == (5, 5)


def test_a_worker_without_fair_functions_claims_fair_tasks_if_no_others_are_ready():
    enqueue_many(keyed.serve, [{"tenant": "a"}] * 3)
    assert len(claims_of(is_fair=False).claim(10)) == 3


def test_a_claim_begins_where_the_one_before_it_ended():
    """Dead entries before that place are not read. After a second at most, a claim reads from the start again."""
    now = [0.0]
    for _ in range(9):
        tasks.nothing.enqueue()
    ids = list(Task.objects.order_by("pk").values_list("pk", flat=True))
    claims = claims_of(is_fair=False, clock=lambda: now[0])
    assert [each.id for each in claims.claim(3)] == ids[:3]
    claims._valid_until = LONGEST_LIFETIME  # by this clock the first claim took no time
    urgent = tasks.nothing.using(priority=50).enqueue()
    assert claims.shared.behind, "which is compiled now, and not within the claim"
    with CaptureQueriesContext(connection) as queries:
        assert [each.id for each in claims.claim(3)] == ids[3:6]
    assert len(queries) == 1
    assert f'"id" > {ids[2]}' in queries[0]["sql"].replace('"django_pglock_task".', "")
    now[0] += LONGEST_LIFETIME
    assert str(claims.claim(1)[0].id) == urgent.id
