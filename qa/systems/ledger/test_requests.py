"""Requests of holders behind two processes: races, repeated requests, busy answers."""

from __future__ import annotations

from uuid import uuid4

import pytest

from example_project.systems.ledger.models import Entry

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_request_that_is_repeated_uses_credits_once(holder):
    """The lock is free again. It is the key that says that it is the same request."""
    ann, key = holder("ann"), uuid4()
    ann.gets(100)
    answers = [ann.order("use", 30, key) for _ in range(3)]
    assert [(answer.status, answer.content) for answer in answers] == [(201, {"balance": 70})] * 3
    assert ann.order("use", 40, key).content == {"balance": 70}, "another amount with the same key uses none"
    assert ann.balance == 70


@pytest.mark.parametrize("form", [{"amount": -5}, {"amount": 5, "key": "x"}])
def test_an_order_that_makes_no_sense_is_refused(holder, form):
    ann = holder("ann")
    assert ann.order("use", **form).status == 400
    assert ann.order("buy", **form).status == 400
    assert not Entry.objects.exists()
