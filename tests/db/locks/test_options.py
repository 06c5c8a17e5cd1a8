"""Invalid options are refused at decoration or call, before a lock is requested."""

from __future__ import annotations

from datetime import timedelta
from functools import partial

import pytest

from django_pglock import Lease, LockScopeError, leader, lock, lock_all, lock_view, semaphore, try_lock

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize("timeout", [-1, float("nan"), float("inf"), True, "1", timedelta(days=100)])
def test_an_invalid_timeout_of_a_lock_is_refused(timeout):
    with pytest.raises(ValueError, match="timeout"):
        lock("a", timeout=timeout)


@pytest.mark.parametrize("make", [lock, lock_all, partial(semaphore, limit=2), Lease, partial(leader, ttl=5)])
def test_an_invalid_busy_response_is_refused_at_decoration(make):
    for on_busy in ("Skip", None, 5):
        with pytest.raises(ValueError, match=f"on_busy is {on_busy!r}; give 'raise', 'skip' or a function"):
            make("a", on_busy=on_busy)


@pytest.mark.parametrize("make", [lock, try_lock, lock_all, partial(semaphore, limit=2), lock_view])
def test_a_scope_that_does_not_exist_is_refused_before_it_is_used(make):
    for scope in ("Session", "", 5):
        with pytest.raises(LockScopeError, match=f"scope is {scope!r}; use one of 'auto', 'session', 'transaction'"):
            make("a", scope=scope)


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (lambda: lock("a", blocking=False), r"lock\(\) has no option 'blocking'; write timeout=0, or try_lock\(\)"),
        (lambda: lock("a", wait=False), r"lock\(\) has no option 'wait'; write timeout=0"),
        (lambda: lock_all("a", ttl=5), r"lock_all\(\) has no option 'ttl'; write Lease\("),
        (lambda: semaphore("a", limit=1, xact=True), r"semaphore\(\) has no option 'xact'; write scope='transaction'"),
        (lambda: try_lock("a", colour="red"), r"try_lock\(\) has no option 'colour'\.$"),
        (lambda: lock_view("a", blocking=False), r"lock_view\(\) has no option 'blocking'; write timeout=0"),
        (lambda: lock("a").acquire(blocking=False), r"acquire\(\) has no option 'blocking'; write timeout=0"),
        (lambda: lock("a").acquire(timeout=1), r"acquire\(\) has no option 'timeout'\. .* lock\(…, timeout=1\)"),
    ],
)
def test_options_of_other_packages_get_a_hint(call, hint):
    with pytest.raises(TypeError, match=hint):
        call()
