"""Fair claims: each key gets its turn."""

from __future__ import annotations

from itertools import groupby
from random import Random

import pytest

from django_pglock import enqueue_many
from django_pglock.models import Task
from tests.db.store.fair_claims import claims_of, tenants
from tests.sample import keyed_tasks as keyed

pytestmark = pytest.mark.django_db(transaction=True)


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
    assert tenants(claims.claim(4)) == ["a", "b", "c", "a"], "no key is left out"


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
