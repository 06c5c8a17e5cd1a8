"""Requests of holders behind two processes: races, repeated requests, busy answers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import pytest

from django_pglock.testing import hold
from example_project.systems.ledger.models import Entry

pytestmark = pytest.mark.django_db(transaction=True)
BROWSER = "text/html,application/xhtml+xml,*/*;q=0.8"


def test_of_four_racing_purchases_the_balance_pays_one(holder, eventually):
    """All four have met the lock before the first gets it. Another holder is served meanwhile."""
    ann, bob = holder("ann"), holder("bob")
    ann.gets(100)
    bob.gets(100)
    busy = []

    def use(number):
        while (answer := ann.order("use", 100)).status == 409:
            busy.append(number)
        return answer.status

    with ThreadPoolExecutor(4) as pool:
        with hold("ledger", "ann"):
            purchases = [pool.submit(use, number) for number in range(4)]
            assert bob.order("use", 100).status == 201
            eventually(lambda: set(busy) == {0, 1, 2, 3})
            assert (ann.balance, bob.balance) == (100, 0)
        assert sorted(purchase.result() for purchase in purchases) == [201, 402, 402, 402]
    assert ann.balance == 0


def test_a_request_that_is_repeated_uses_credits_once(holder):
    """The lock is free again. It is the key that says that it is the same request."""
    ann, key = holder("ann"), uuid4()
    ann.gets(100)
    answers = [ann.order("use", 30, key) for _ in range(3)]
    assert [(answer.status, answer.content) for answer in answers] == [(201, {"balance": 70})] * 3
    assert ann.order("use", 40, key).content == {"balance": 70}, "another amount with the same key uses none"
    assert ann.balance == 70


def test_a_busy_lock_is_answered_with_a_page_or_with_json(holder):
    ann = holder("ann")
    with hold("ledger", "ann"), ThreadPoolExecutor(2) as pool:
        page = pool.submit(ann.order, "use", 1, Accept=BROWSER)
        detail = pool.submit(ann.order, "use", 1, Accept="application/json")
    assert (page.result().status, page.result().headers["Content-Type"]) == (409, "text/html; charset=utf-8")
    assert b"<h1>One moment</h1>" in page.result().body
    assert (detail.result().status, detail.result().headers["Retry-After"]) == (409, "1")
    assert detail.result().content["title"] == "Conflict"


@pytest.mark.parametrize("form", [{"amount": -5}, {"amount": 5, "key": "x"}])
def test_an_order_that_makes_no_sense_is_refused(holder, form):
    ann = holder("ann")
    assert ann.order("use", **form).status == 400
    assert ann.order("buy", **form).status == 400
    assert not Entry.objects.exists()
