"""The groups of failed tasks as a worker has counted them, for the pages of the admin."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import pytest
from django.db.models.functions import Now

from django_pglock.models import QueueCount, Task, Worker
from django_pglock.store import shared_counts, shared_failures
from tests.db.store.test_failures import fail

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def living(db, slow_beats):
    return Worker.objects.create(id=uuid4(), queues=[], threads=1, pid=7)


def count():
    QueueCount.objects.update(count_again_at=Now() - timedelta(days=1))
    shared_counts.keep_counts("default")


def read():
    return shared_failures.shared_failures("default")


def test_shared_groups_of_failures_are_those_of_the_last_count():
    fail(fingerprint=7, hours_ago=3)
    fail(fingerprint=7)
    fail("bank.Away", fingerprint=8, trace="bank.Away: caf\u00e9 \U0001f600")
    fail(fingerprint=None)
    assert read().age is None
    count()
    groups, age = read()
    assert groups == Task.objects.failures()
    assert 0 <= age < shared_failures.MAX_AGE_FOR_PAGES
    fail(fingerprint=9)
    assert len(read().groups) == len(groups), "not counted yet"


def test_old_or_changed_groups_of_failures_are_counted_again():
    fail(fingerprint=7)
    count()
    shared_failures.invalidate_failures("default")
    fail(fingerprint=8)
    assert (len(read().groups), read().age) == (2, None)
    count()
    QueueCount.objects.update(counted_at=Now() - timedelta(seconds=shared_failures.MAX_AGE_FOR_PAGES + 1))
    assert read().age is None


def test_counts_are_not_used_when_no_worker_is_alive_to_count_again(living):
    """A worker that has ended in order has no row."""
    count()
    Worker.objects.update(heartbeat_at=Now() - timedelta(seconds=1500))
    assert read().age is not None
    Worker.objects.update(heartbeat_at=Now() - timedelta(seconds=2500))
    assert read().age is None
    Worker.objects.update(heartbeat_at=Now())
    assert read().age is not None
    living.delete()
    fail(fingerprint=7)
    assert (len(read().groups), read().age) == (1, None)


def test_a_count_that_had_begun_before_the_change_is_not_shown(monkeypatch):
    failures = shared_counts.failures

    def changed_meanwhile(using):
        found = failures(using)
        shared_failures.invalidate_failures(using)
        return found

    monkeypatch.setattr(shared_counts, "failures", changed_meanwhile)
    fail(fingerprint=7)
    count()
    assert read().age is None
    assert QueueCount.objects.filter(queue="default").exists(), "the counts of the queues are"
