"""The signals of locks: who gets which, and what an exception of a receiver does."""

from __future__ import annotations

import pytest
from django.db import connection

from django_pglock import LockLost, LockNotAvailable, lock, signals, try_lock

pytestmark = pytest.mark.django_db(transaction=True)


def test_signals_are_sent_when_a_lock_is_acquired_released_or_busy(somebody):
    heard = []
    receivers = {
        name: lambda sender, handle, name=name, **kwargs: heard.append((name, handle.name))
        for name in ("lock_acquired", "lock_released", "lock_busy")
    }
    for name, receiver in receivers.items():
        getattr(signals, name).connect(receiver)
    try:
        with lock("a"):
            pass
        somebody.holds("b")
        with try_lock("b"):
            pass
    finally:
        for name, receiver in receivers.items():
            getattr(signals, name).disconnect(receiver)
    assert heard == [("lock_acquired", "a"), ("lock_released", "a"), ("lock_busy", "b")]


@pytest.fixture
def raising():
    """Receivers of all signals that raise."""
    called = []

    def fail(sender, handle, **kwargs):
        called.append(handle.name)
        raise ZeroDivisionError

    sent = (signals.lock_acquired, signals.lock_released, signals.lock_busy, signals.lock_lost)
    for signal in sent:
        signal.connect(fail)
    yield called
    for signal in sent:
        signal.disconnect(fail)


def test_an_exception_of_a_receiver_has_no_effect_on_the_lock(somebody, raising):
    with lock("a"):
        assert not somebody.can_have("a")
    assert somebody.can_have("a")
    somebody.holds("b")
    with pytest.raises(LockNotAvailable), lock("b", timeout=0):
        pass
    with pytest.raises(LockLost), lock("c"):
        connection.close()
    assert raising == ["a", "a", "b", "c", "c"]
