"""Fair claims: each key gets its turn."""

from __future__ import annotations

import time
from itertools import groupby
from random import Random
from uuid import uuid4

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from django_pglock import enqueue_many
from django_pglock.models import Task
from django_pglock.worker.claiming.queue_cursor import QueueCursors
from tests.sample import keyed_tasks as keyed
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)

PATHS = ["tests.sample.keyed_tasks.serve", "tests.sample.tasks.nothing"]


def claims_of(queue="default", *, is_fair=True, clock=time.monotonic):
    return QueueCursors("default", worker=uuid4(), paths=PATHS, is_fair=is_fair, clock=clock).of(queue)


def tenants(claims):
    rows = dict(Task.objects.values_list("pk", "fair_key"))
    return [rows[claim.id] for claim in claims]


def test_fair_claims_alternate_between_keys_with_few_and_many_tasks():
    enqueue_many(keyed.serve, [{"tenant": "large"}] * 1000)
    enqueue_many(keyed.serve, [{"tenant": "small"}] * 10)
    got = tenants(claims_of().claim(20))
    assert got.count("small") == 10
    assert [len(list(run)) for _, run in groupby(got)] == [1] * 20, "in turns"


def test_fair_claims_of_one_task_alternate_between_the_keys():
    """The claims of a worker with a single thread and long tasks, one by one."""
    for tenant in "abc":
        enqueue_many(keyed.serve, [{"tenant": tenant}] * 50)
    claims = claims_of()
    got = [tenant for _ in range(30) for tenant in tenants(claims.claim(1))]
    assert got == ["a", "b", "c"] * 10


def test_fair_claims_follow_priority_and_order_within_a_key():
    ids = [int(keyed.serve.using(priority=priority).enqueue("a").id) for priority in (0, 5, 5)]
    assert [claim.id for claim in claims_of().claim(5)] == [ids[1], ids[2], ids[0]]


def in_order(numbers, priorities):
    return sorted(numbers, key=lambda number: (-priorities[number], number))


@pytest.mark.parametrize("limit", [1, 2, 7, 50])
def test_fair_claims_of_any_size_follow_priority_within_a_key(limit):
    """Each key has its most urgent tasks first, from the first claim to the last."""
    random, priorities = Random(1), {}
    for number in range(60):
        priority = random.choice([-100, 0, 5, 100])
        priorities[int(keyed.serve.using(priority=priority).enqueue(f"tenant {number % 3}").id)] = priority
    claims, got = claims_of(), []
    while more := claims.claim(limit):
        got += more
    assert len(got) == 60
    keys = dict(zip((claim.id for claim in got), tenants(got), strict=True))
    for tenant in range(3):
        ids = [claim.id for claim in got if keys[claim.id] == f"tenant {tenant}"]
        assert ids == in_order(ids, priorities)


def test_a_worker_follows_priority_within_a_fair_key(worker, eventually):
    random, priorities = Random(2), {}
    keyed.served.clear()
    for number in range(200):
        priorities[number] = random.choice([0, 5, 9])
        keyed.serve.using(priority=priorities[number]).enqueue(f"tenant {number % 2}", number)
    worker(threads=1)
    eventually(lambda: len(keyed.served) == 200)
    for key in ("tenant 0", "tenant 1"):
        numbers = [number for tenant, number in keyed.served if tenant == key]
        assert numbers == in_order(numbers, priorities)


def test_a_later_urgent_task_is_the_next_of_its_key():
    enqueue_many(keyed.serve, [{"tenant": "a"}] * 20)
    enqueue_many(keyed.serve, [{"tenant": "b"}] * 20)
    claims = claims_of()
    assert tenants(claims.claim(3)) == ["a", "b", "a"]
    urgent = int(keyed.serve.using(priority=100).enqueue("b").id)
    assert [claim.id for claim in claims.claim(2)][-1] == urgent


def test_fair_claims_ignore_priority_between_keys():
    """A key whose tasks all have a high priority gets no larger share."""
    enqueue_many(keyed.serve.using(priority=-100), [{"tenant": "modest"}] * 20)
    enqueue_many(keyed.serve.using(priority=100), [{"tenant": "pushing"}] * 20)
    claims = claims_of()
    got = [tenant for _ in range(20) for tenant in tenants(claims.claim(1))]
    assert (got.count("modest"), got.count("pushing")) == (10, 10)
    assert tenants(claims.claim(4)) == ["modest", "pushing"] * 2


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


def fair_queries(queries):
    return [each["sql"] for each in queries if "WITH RECURSIVE keys" in each["sql"]]


def test_a_single_task_is_claimed_without_the_query_for_fair_tasks():
    now = [0.0]
    claims = claims_of(clock=lambda: now[0])
    assert not claims.claim(5)
    with CaptureQueriesContext(connection) as queries:
        for _ in range(3):
            now[0] += 60.0
            tasks.nothing.enqueue()
            assert tenants(claims.claim(5)) == [None]
    assert not fair_queries(queries)


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


@pytest.mark.parametrize(("is_fair", "pause"), [(True, 0.1), (False, 1.0)])
def test_the_query_for_fair_tasks_is_rare_while_only_other_tasks_are_ready(is_fair, pause):
    """The query for fair tasks takes as long as a claim. Fair tasks enqueued later are claimed after a pause."""
    now = [0.0]
    claims = claims_of(is_fair=is_fair, clock=lambda: now[0])
    claims.claim(1)
    enqueue_many(tasks.nothing, [{}] * 20)
    now[0] = 60.0
    with CaptureQueriesContext(connection) as queries:
        assert tenants(claims.claim(1) + claims.claim(1)) == [None, None], "as after a long sleep"
    assert not fair_queries(queries)
    enqueue_many(keyed.serve, [{"tenant": "a"}] * 3)
    now[0] += 0.9 * pause
    assert tenants(claims.claim(1)) == [None]
    now[0] += 0.2 * pause
    assert [*tenants(claims.claim(1)), *tenants(claims.claim(1)), *tenants(claims.claim(1))] == ["a", None, "a"]


def test_fair_tasks_and_other_tasks_of_a_queue_are_claimed_equally_often():
    enqueue_many(keyed.serve, [{"tenant": "a"}] * 100)
    enqueue_many(tasks.nothing, [{}] * 100)
    claims = claims_of()
    got = [tenant for _ in range(10) for tenant in tenants(claims.claim(1))]
    assert (got.count("a"), got.count(None)) == (5, 5)


def test_a_worker_without_fair_functions_claims_fair_tasks_if_no_others_are_ready():
    enqueue_many(keyed.serve, [{"tenant": "a"}] * 3)
    assert len(claims_of(is_fair=False).claim(10)) == 3


@pytest.mark.parametrize(
    ("count", "claimed"), [(10, [["z"], []]), (999, [["z"], []]), (1000, [[], ["z"]]), (1500, [[], ["z"]])]
)
def test_keys_of_a_removed_function_delay_no_task(count, claimed):
    """Such keys come first, and there are more than one claim takes. Each claim reads a thousand keys at most."""
    enqueue_many(keyed.serve, [{"tenant": f"a{number:04}"} for number in range(count)])
    Task.objects.update(task_path="gone.function")
    keyed.serve.enqueue("z")
    claims = claims_of()
    assert [tenants(claims.claim(2)) for _ in range(2)] == claimed
    assert Task.objects.filter(status="READY").count() == count


def test_of_a_key_only_tasks_of_known_functions_are_claimed():
    gone, *known = (int(keyed.serve.enqueue("a").id) for _ in range(3))
    Task.objects.filter(pk=gone).update(task_path="gone.function")
    assert [claim.id for claim in claims_of().claim(5)] == known


def test_a_claim_skips_a_locked_row(locked):
    first, *others = (int(keyed.serve.enqueue(tenant).id) for tenant in "aab")
    with locked(first):
        assert [claim.id for claim in claims_of().claim(5)] == others


@pytest.mark.usefixtures("without_indexes")
def test_keys_are_served_in_their_order_whatever_the_plan():
    for tenant in "cab":
        keyed.serve.enqueue(tenant)
    assert tenants(claims_of().claim(5)) == ["a", "b", "c"]


def test_the_next_fair_claim_begins_with_the_key_after_the_last_one():
    for tenant in "abcd":
        enqueue_many(keyed.serve, [{"tenant": tenant}] * 3)
    Task.objects.filter(fair_key__in="bd").update(task_path="gone.function")
    claims = claims_of()
    assert [tenants(claims.claim(2)) for _ in range(4)] == [["a", "c"], ["a", "c"], ["a", "c"], []]


def test_a_worker_runs_all_tasks_with_fair_keys(worker, eventually):
    worker()
    for tenant in "abcdefg":
        enqueue_many(keyed.serve, [{"tenant": tenant}] * 30)
    eventually(lambda: Task.objects.filter(status="SUCCESSFUL").count() == 210)


def test_two_workers_share_the_turns_without_claiming_twice(in_threads):
    for tenant in "abcde":
        enqueue_many(keyed.serve, [{"tenant": tenant}] * 100)

    def drain(number):
        claims, got = claims_of(), []
        while more := claims.claim(7):
            got += [claim.id for claim in more]
        return got

    got = [id_ for some in in_threads(drain, 4) for id_ in some]
    assert len(got) == len(set(got)) == 500
