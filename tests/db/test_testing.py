"""The tools for tests of projects."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import transaction
from django.utils import timezone

from django_pglock import Group, LockNotAvailable, Rate, Unique, enqueue_many, lock, task
from django_pglock.models import AdvisoryLock, Task
from django_pglock.testing import assert_locked, assert_no_locks, assert_not_locked, hold


@pytest.mark.django_db
def test_hold_takes_the_lock_in_another_session():
    """Also inside the transaction of a TestCase, where this session could take its own lock again."""
    with hold("checkout", 1):
        with pytest.raises(LockNotAvailable), lock("checkout", 1, timeout=0):
            pass
        assert_locked("checkout:1")
        assert [row.name for row in AdvisoryLock.objects.for_name("checkout", 1)] == ["checkout:1"]
        with pytest.raises(AssertionError, match="already"), hold("checkout:1"):
            pass
        with pytest.raises(AssertionError, match="is held"):
            assert_not_locked("checkout:1")
        with pytest.raises(AssertionError, match="1 advisory"):
            assert_no_locks()
    assert_not_locked("checkout", 1)
    with pytest.raises(AssertionError, match="No session holds the lock"):
        assert_locked("checkout", 1)


@pytest.mark.django_db(transaction=True)
def test_workers_own_locks_do_not_count(worker):
    worker()
    assert_no_locks()


@pytest.mark.django_db
def test_a_lock_of_a_session_that_came_later_is_seen_within_one_transaction():
    """PostgreSQL keeps a list of the sessions for the rest of a transaction, once one has asked for it."""
    assert_no_locks()
    with hold("later"), pytest.raises(AssertionError, match="1 advisory"):
        assert_no_locks()


# The statuses of tasks in a TestCase, whose transaction is never committed. docs/testing.md has this list.


def statuses():
    return list(Task.objects.order_by("id").values_list("status", flat=True))


def send(number=0): ...


OFTEN = Rate(100, per=1)
HOUR = timedelta(hours=1)
AT_ONCE = [
    ({}, {}, ["READY", "READY"]),
    ({"lock": "a"}, {}, ["READY", "BLOCKED"]),
    ({"group": "a"}, {}, ["READY", "BLOCKED"]),
    ({"rate": OFTEN}, {}, ["READY", "READY"]),
    ({"lock": "a", "rate": OFTEN}, {}, ["READY", "BLOCKED"]),
    ({"lock": "a", "fair": "b"}, {}, ["READY", "BLOCKED"]),
    ({"unique": True}, {}, ["READY", "READY"]),
    ({"lock": "a"}, {"run_after": HOUR}, ["SCHEDULED", "SCHEDULED"]),
    ({"group": Group("a", limit=3, gather=300)}, {}, ["SCHEDULED", "SCHEDULED"]),
]


@pytest.mark.django_db
@pytest.mark.parametrize(("options", "using", "expected"), AT_ONCE)
def test_a_call_in_a_testcase_gets_its_status_at_once(own_registry, options, using, expected):
    function = task(**options)(send).using(**using)
    for number in range(2):
        function.enqueue(number=number)
    assert statuses() == expected


AFTER_THE_HOOKS = [
    ({"lock": "a", "unique": Unique("{number}")}, ["READY", "BLOCKED"]),
    ({"lock": "a", "rate": OFTEN, "concurrency": 2}, ["READY", "READY"]),
    ({"rate": OFTEN, "unique": True}, ["READY", "READY"]),
    ({"group": "a", "unique": True}, ["READY", "BLOCKED"]),
]


@pytest.mark.django_db
@pytest.mark.parametrize(("options", "expected"), AFTER_THE_HOOKS)
def test_a_call_with_a_key_and_more_is_blocked_until_the_hooks_have_run(
    own_registry, django_capture_on_commit_callbacks, options, expected
):
    function = task(**options)(send)
    with django_capture_on_commit_callbacks(execute=True):
        for number in range(2):
            function.enqueue(number=number)
        assert statuses() == ["BLOCKED", "BLOCKED"]
    assert statuses() == expected


@pytest.mark.django_db
@pytest.mark.parametrize("options", [{"lock": "a"}, {"group": "a"}, {"rate": OFTEN}])
def test_so_is_a_call_with_a_key_in_a_nested_block_or_in_a_bulk(
    own_registry, django_capture_on_commit_callbacks, options
):
    function = task(**options)(send)
    with django_capture_on_commit_callbacks(execute=True), transaction.atomic():
        function.enqueue()
        assert statuses() == ["BLOCKED"]
    assert statuses() == ["READY"]
    Task.objects.all().delete()
    with django_capture_on_commit_callbacks(execute=True):
        enqueue_many(function, [{}])
        assert statuses() == ["BLOCKED"]
    assert statuses() == ["READY"]


@pytest.mark.django_db
def test_so_is_a_call_that_waits_for_a_task_that_has_succeeded(own_registry, django_capture_on_commit_callbacks):
    function = task(send)
    awaited = function.enqueue()
    Task.objects.update(status="SUCCESSFUL", finished_at=timezone.now())
    with django_capture_on_commit_callbacks(execute=True):
        function.using(after=[awaited]).enqueue()
        assert statuses()[1:] == ["BLOCKED"]
    assert statuses()[1:] == ["READY"]
