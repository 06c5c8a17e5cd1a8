"""The package's own advisory locks: no number and no name that a project gives to ``lock`` can meet them."""

from __future__ import annotations

import hashlib
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import lru_cache
from uuid import uuid4

import pytest
from django.db import connection, transaction
from django.utils import timezone

from django_pglock import lock
from django_pglock.models import AdvisoryLock, Task
from django_pglock.models import Worker as WorkerRow
from django_pglock.postgres.sessions import dedicated_connection
from django_pglock.store.admit import LOCK_KEYS, admit
from django_pglock.store.release import TRY_UPKEEP_LOCK
from django_pglock.store.statements import filled
from django_pglock.testing import assert_no_locks, hold
from tests.sample import keyed_tasks as keyed
from tests.sample import tasks
from tests.sql import execute_sql

pytestmark = pytest.mark.django_db(transaction=True)

HELD = """
SELECT DISTINCT (classid::bigint << 32) | objid::bigint AS number, objsubid
FROM pg_locks JOIN pg_stat_activity USING (pid)
WHERE locktype = 'advisory' AND (pid = pg_backend_pid() OR application_name = %s) ORDER BY number
"""


def held(application=""):
    """Return the locks of this session and of the sessions of an application: the 64 bits and the space of each."""
    return execute_sql(HELD, [application])


def lock_keys(*keys, cursor=None):
    """Take the locks that admission to these keys takes."""
    statement = filled(LOCK_KEYS)
    if cursor is not None:
        cursor.execute(statement, [list(keys)])
        return
    with connection.cursor() as cursor:
        cursor.execute(statement, [list(keys)])


def number_of(key):
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big", signed=True)


@pytest.fixture
def holding_upkeep_lock():
    """Hold the upkeep lock during a block."""

    @contextmanager
    def holding():
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(TRY_UPKEEP_LOCK)
            assert cursor.fetchone()[0] is True
            yield

    return holding


def test_internal_locks_use_two_integers_and_locks_of_users_one_bigint(worker, holding_upkeep_lock):
    """``lock`` takes 64-bit numbers only, which are the other space of PostgreSQL's."""
    with holding_upkeep_lock():
        assert {space for _, space in held()} == {2}
    with transaction.atomic():
        lock_keys("order:5")
        assert {space for _, space in held()} == {2}
    worker()
    assert 2 in {space for _, space in held("lockworker heartbeat")}
    with lock("order:5"), lock(12345):
        assert {space for _, space in held()} == {1}


def test_a_lock_with_the_same_64_bits_does_not_block_a_worker(worker, holding_upkeep_lock, eventually):
    """A project may lock any number. The worker still sends heartbeats, does its upkeep and admits tasks."""
    first = worker()
    [(of_worker, _)] = held("lockworker heartbeat")
    first.shutdown()
    with holding_upkeep_lock():
        [(of_upkeep, _)] = held()
    with transaction.atomic():
        lock_keys("order:1")
        [(of_admission, _)] = held()
    with ExitStack() as stack:
        for number in (of_worker, of_upkeep, of_admission):
            stack.enter_context(hold(number))
        keyed.step.enqueue(1, 1)
        keyed.step.enqueue(1, 2)
        tasks.nothing.using(run_after=timezone.now() + timedelta(seconds=0.2)).enqueue()
        worker()
        eventually(lambda: Task.objects.filter(status="SUCCESSFUL").count() == 3, why="something is kept from its work")


@lru_cache
def keys_of_one_number():
    """Return the numbers of two orders whose keys have one number of 32 bits. One pair is among some 80,000 keys."""
    seen = {}
    for order in range(1_000_000):
        if (number := number_of(f"order:{order}")) in seen:
            return seen[number], order
        seen[number] = order
    raise AssertionError("a million keys, and no two of one number")


def test_tasks_of_two_keys_with_the_same_number_are_both_admitted():
    """Tasks of one key wait for an admission of the other key, which is one message to the server."""
    one, other = keys_of_one_number()
    results = [keyed.step.enqueue(order) for order in (one, other, one)]
    rows = [Task.objects.get(pk=each.id) for each in results]
    assert [row.status for row in rows] == ["READY", "READY", "BLOCKED"]
    assert admit("default", {row.lock_key for row in rows}) == 0
    with transaction.atomic():
        lock_keys(*(row.lock_key for row in rows))
        assert len(held()) == 1, "not two keys of one number"


WAITING = """
SELECT objid::bigint::bit(32)::int, granted FROM pg_locks
WHERE locktype = 'advisory' AND objsubid = 2 AND pid = %s ORDER BY granted
"""


def test_an_admission_to_several_keys_takes_them_in_the_order_of_their_numbers(in_threads, eventually):
    """In the order of their texts, two admissions whose keys share numbers could deadlock."""
    low, high = next(
        (f"order:{later}", f"order:{later - 1}")
        for later in range(1, 100)
        if number_of(f"order:{later}") < number_of(f"order:{later - 1}")
    )
    first, second = dedicated_connection("default"), dedicated_connection("default")
    for each in (first, second):
        each.ensure_connection()
        each.set_autocommit(False)

    def admit_or_look(number):
        if number == 0:
            with second.cursor() as cursor:
                lock_keys(high, low, cursor=cursor)
            return None
        try:
            with connection.cursor() as cursor:
                pid = second.connection.info.backend_pid
                return eventually(lambda: cursor.execute(WAITING, [pid]).fetchall())
        finally:
            first.close()

    try:
        with first.cursor() as cursor:
            lock_keys(low, cursor=cursor)
        assert in_threads(admit_or_look, 2)[1] == [(number_of(low), False)]
    finally:
        first.close()
        second.close()


def test_internal_locks_are_shown_with_their_purpose_and_without_a_key(worker, holding_upkeep_lock):
    """A number of 64 bits would belong to another lock, and its holders would be wrong."""
    with holding_upkeep_lock(), hold(held()[0][0]):
        assert str(AdvisoryLock.objects.get(key=held()[0][0])) == f"#{held()[0][0]}"
        assert [row.name for row in AdvisoryLock.objects.filter(key=None)] == ["upkeep of tasks"]
    with transaction.atomic():
        lock_keys("order:5", "order:6")
        shown = AdvisoryLock.objects.filter(key=None)
        assert {str(row) for row in shown} == {"admission of tasks"}
        assert len({row.pk for row in shown}) == 2
    worker()
    row = AdvisoryLock.objects.get(name=f"worker {WorkerRow.objects.get().name}")
    assert (row.key, row.is_granted, row.waiters, row.blocked_by) == (None, True, 0, [])


def test_a_dead_worker_with_the_same_lock_number_is_not_shown(worker):
    """Rows of dead workers stay for a while, and one of them may have had the number of a living one."""
    worker()
    same = WorkerRow.objects.get()
    name = same.name
    same.pk, same.name, same.heartbeat_at = uuid4(), "dead", timezone.now() - timedelta(days=1)
    same.save(force_insert=True)
    assert AdvisoryLock.objects.filter(name=f"worker {name}").count() == 1


def test_assert_no_locks_ignores_internal_locks():
    """A transaction that admits a task, in the thread of a test or in another one, ends very soon."""
    with transaction.atomic():
        lock_keys("order:5")
        assert_no_locks()
        with hold(5), pytest.raises(AssertionError, match="1 advisory"):
            assert_no_locks()
