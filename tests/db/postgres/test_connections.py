"""A database alias that does not exist is refused by one sentence, whichever function was called."""

from __future__ import annotations

import pytest

from django_pglock import Lease, leader, listen, lock, lock_all, lock_table, lock_timeout, notify, semaphore, try_lock
from django_pglock.errors import ConfigurationError
from django_pglock.models import Task
from django_pglock.postgres.connections import pause_after
from django_pglock.testing import assert_locked, assert_no_locks, hold
from django_pglock.worker import Worker
from tests.sample.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)

BLOCKS = {
    "lock": lambda using: lock("a", using=using),
    "try_lock": lambda using: try_lock("a", using=using),
    "lock_all": lambda using: lock_all("a", "b", using=using),
    "semaphore": lambda using: semaphore("a", limit=2, using=using),
    "Lease": lambda using: Lease("a", using=using),
    "leader": lambda using: leader("a", using=using),
    "lock_timeout": lambda using: lock_timeout(2, using=using),
    "hold": lambda using: hold("a", using=using),
}


def entered(block):
    def enter(using):
        with block(using):
            raise AssertionError("it was entered")

    return enter


CALLS = {name: entered(block) for name, block in BLOCKS.items()} | {
    "lock_table": lambda using: lock_table(Effect, using=using),
    "listen": lambda using: next(listen("a", using=using)),
    "notify": lambda using: notify("a", using=using),
    "assert_locked": lambda using: assert_locked("a", using=using),
    "assert_no_locks": lambda using: assert_no_locks(using=using),
    "Worker": lambda using: Worker(using=using),
    "cancel": lambda using: Task.objects.using(using).cancel(),
}


@pytest.mark.parametrize("using", [1.5, True, b"default", "nope"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_an_alias_that_does_not_exist_is_refused(call, using):
    with pytest.raises(ConfigurationError) as refused:
        call(using)
    assert str(refused.value) == f"DATABASES has no alias {using!r}. Its aliases: default."


def test_pauses_double_up_to_a_bound_with_jitter():
    assert all(0.25 <= pause_after(1, 0.5, 30.0) <= 0.5 for _ in range(100))
    assert all(0.5 <= pause_after(2, 0.5, 30.0) <= 1.0 for _ in range(100))
    assert all(15 <= pause_after(1000, 0.5, 30.0) <= 30 for _ in range(100))
