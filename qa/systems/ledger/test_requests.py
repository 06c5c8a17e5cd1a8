"""Requests of holders behind two processes: races, repeated requests, busy answers."""

from __future__ import annotations

from uuid import uuid4

import pytest

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_request_that_is_repeated_uses_credits_once(holder):
    """The lock is free again. It is the key that says that it is the same request."""
    ann, key = holder("ann"), uuid4()
    ann.gets(100)
    answers = [ann.order("use", 30, key) for _ in range(3)]
    assert [(answer.status, answer.content) for answer in answers] == [(201, {"balance": 70})] * 3
    assert ann.order("use", 40, key).content == {"balance": 70}, "another amount with the same key uses none"
    assert ann.balance == 70
