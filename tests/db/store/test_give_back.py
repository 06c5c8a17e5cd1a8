"""Claims whose answer was lost in transit."""

from __future__ import annotations

import math
import time
from datetime import timedelta
from uuid import uuid4

import pytest
from django.db import connection
from django.db.models.functions import Now

from django_pglock.models import Task
from django_pglock.store.settle import give_back, server_time
from django_pglock.store.wake import channel_of
from tests import server_clock
from tests.db.store.endings import statuses
from tests.db.store.workers import add_sleeping_worker, register
from tests.db.worker.conftest import make_feeder
from tests.sample import keyed_tasks as keyed
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)


def test_claims_that_their_worker_does_not_know_are_given_back(claim):
    """The answer to the claim was lost. Without the comparison, the heartbeat would keep this task RUNNING forever."""
    worker = uuid4()
    register(worker)
    for _ in range(3):
        tasks.nothing.enqueue()
    known, *unknown = claim(3, worker=worker)
    assert give_back("default", worker, [known.id], older_than=60) == 0, "it may be in flight here in a moment"
    assert give_back("default", worker, [known.id], older_than=0, except_keys=["order:1"]) == 2
    assert set(Task.objects.filter(status="READY").values_list("pk", flat=True)) == {each.id for each in unknown}


def test_a_task_that_is_given_back_looks_unclaimed(claim):
    """Only the token stays: the answer to the claim may still arrive."""
    tasks.nothing.enqueue()
    [mine] = claim()
    assert give_back("default", mine.worker, []) == 1
    row = Task.objects.get()
    assert (row.status, row.worker, row.started_at, row.finished_at) == ("READY", None, None, None)
    assert (row.attempts, row.uncounted, row.attempts_made) == (1, 1, 0)


def test_a_task_with_the_largest_numbers_is_given_back(claim):
    """A plain INSERT may write these numbers. If the statement failed, no other claim would be given back."""
    tasks.nothing.enqueue()
    Task.objects.update(attempts=2**31 - 1, uncounted=2**31 - 1)
    [mine] = claim()
    assert give_back("default", mine.worker, []) == 1
    row = Task.objects.get()
    assert (row.status, row.attempts, row.uncounted) == ("READY", 2**31 - 1, 2**31 - 1)


def test_a_second_attempt_keeps_the_date_of_the_first(claim):
    tasks.nothing.enqueue()
    claim()
    Task.objects.update(status="READY")
    [mine] = claim()
    first = Task.objects.get().started_at
    assert give_back("default", mine.worker, []) == 1
    assert Task.objects.get().started_at == first


def test_give_back_does_not_change_claims_of_other_workers(claim):
    for _ in range(2):
        tasks.nothing.enqueue()
    [mine], [other] = claim(), claim()
    assert give_back("default", mine.worker, []) == 1
    assert Task.objects.get(pk=other.id).worker == other.worker


def test_a_task_with_a_lock_key_goes_back_to_its_place_in_the_queue_of_the_key(claim):
    """The key is free at once, and no other event would admit the task."""
    for number in range(2):
        keyed.step.enqueue(1, number)
    [mine] = claim()
    assert give_back("default", mine.worker, []) == 1
    assert statuses() == ["READY", "BLOCKED"]


def test_give_back_does_not_change_a_claim_that_is_in_flight(claim):
    """The caller lists its claims first. Later claims, and those of a group being claimed, are not in the list."""
    before = server_time("default")
    keyed.step.enqueue(1)
    [mine] = claim()
    assert give_back("default", mine.worker, [], before=before) == 0
    assert give_back("default", mine.worker, [], except_keys=["order:1"]) == 0
    assert give_back("default", mine.worker, [], before=server_time("default"), except_keys=["order:2"]) == 1


@pytest.mark.parametrize("older_than", [0.0, 4.0])
def test_a_claim_from_before_a_step_of_the_clock_is_given_back(claim, older_than):
    """A failover to a server whose clock is behind: the answer to the claim was lost with the old server."""
    tasks.nothing.enqueue()
    [mine] = claim()
    server_clock.put_back(300)
    before = server_time("default")
    assert give_back("default", mine.worker, [], before=before, older_than=older_than) == 1


def test_give_back_wakes_a_sleeping_worker(claim):
    """The worker that gives back may have no free thread. Another sleeping worker would wait for its poll."""
    sleeping = add_sleeping_worker()
    tasks.nothing.using(queue_name="mail").enqueue()
    [mine] = claim(queue="mail")
    heard = []
    with connection.cursor() as cursor:
        cursor.execute(f"LISTEN {channel_of(sleeping.parent)}")
        connection.connection.add_notify_handler(lambda news: heard.append(news.payload))
        assert give_back("default", mine.worker, []) == 1
        cursor.execute("UNLISTEN *")
    assert heard == [f"{sleeping.pk} 0 mail"]


@pytest.fixture
def compare(settings):
    """Return a function with which the heartbeat of a worker compares its list with the table."""
    settings.DJANGO_PGLOCK = {**settings.DJANGO_PGLOCK, "HEARTBEAT_INTERVAL": 0.006}

    def compare(feeder):
        feeder._compared_at, feeder.in_flight.changed_at = -math.inf, time.monotonic()
        feeder._compare_if_due()

    return compare


def test_a_claim_is_not_given_back_because_the_heartbeat_froze_after_its_list(claim, compare, monkeypatch):
    """The worker claims after the list is made, and the statement comes later than HEARTBEAT_LIMIT allows for."""
    feeder = make_feeder()
    tasks.nothing.enqueue()

    def list_and_freeze():
        claim(worker=feeder.worker)
        time.sleep(0.1)
        return []

    monkeypatch.setattr(feeder.in_flight, "task_ids", list_and_freeze)
    compare(feeder)
    assert Task.objects.get().status == "RUNNING"


def test_a_group_that_waited_for_a_lock_is_not_given_back_before_its_answer_is_there(claim, compare):
    """The table was locked for longer than HEARTBEAT_LIMIT. The date of the claim is that of its message."""
    feeder = make_feeder()
    tasks.nothing.using(lock="of the group").enqueue()
    [claimed] = claim(worker=feeder.worker)
    Task.objects.update(last_attempted_at=Now() - timedelta(seconds=1))
    feeder.in_flight.claiming_groups[claimed] = claimed.lock_key
    compare(feeder)
    assert Task.objects.get().status == "RUNNING"
    feeder.in_flight.claiming_groups.clear()
    compare(feeder)
    assert Task.objects.get().status == "READY"
