"""A worker and its queues: which it serves, and in which order."""

from __future__ import annotations

from collections import Counter

import pytest
from django.db import connection

from django_pglock.models import Task, Worker
from django_pglock.tasks import registry
from django_pglock.tasks.queues import OWN_QUEUE
from django_pglock.worker import Worker as WorkerUnderTest
from django_pglock.worker.claiming import claimer, queue_cursor, ready_queues
from django_pglock.worker.claiming.queue_cursor import FEW_QUEUES, QueueCursor
from tests.sample import keyed_tasks, tasks
from tests.sample.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)


def fill(queue, count):
    for number in range(count):
        tasks.record.using(queue_name=queue).enqueue(queue, number)


@pytest.fixture
def one_by_one(monkeypatch):
    """Let a worker with one thread claim one task at a time, so that each claim statement takes one task."""
    monkeypatch.setattr("django_pglock.worker.capacity.PREFETCH_TIME", 0)


def in_order():
    return list(Effect.objects.order_by("id").values_list("name", flat=True))


def test_strict_order_polls_a_queue_when_the_earlier_ones_are_empty(worker, eventually, one_by_one):
    fill("low", 5)
    fill("mail-b", 5)
    fill("mail-a", 5)
    fill("high", 20)
    worker(queues=["high", "mail*", "low"], order="strict", threads=1)
    eventually(lambda: Effect.objects.count() == 35)
    assert in_order() == ["high"] * 20 + ["mail-a"] * 5 + ["mail-b"] * 5 + ["low"] * 5


def test_weighted_queues_are_claimed_in_proportion_to_their_weights(worker, eventually, one_by_one):
    fill("low", 20)
    fill("high", 60)
    worker(queues=["high=3", "low"], threads=1)
    eventually(lambda: Effect.objects.count() == 80)
    assert Counter(in_order()[:40]) == {"high": 30, "low": 10}


def test_prefixes_and_exclusions_hold_for_claims_and_for_notifications(worker, eventually):
    running = worker(queues=["mail*"], exclude=["mail-bulk*"])
    for queue in ("mail-bulk", "mail-bulk-2", "other", "mail", "mail-a"):
        fill(queue, 1)
    eventually(lambda: Effect.objects.count() == 2)
    fill("mail-b", 1)
    eventually(lambda: Effect.objects.count() == 3)
    assert sorted(in_order()) == ["mail", "mail-a", "mail-b"]
    assert set(Task.objects.filter(status="READY").values_list("queue", flat=True)) == {
        "mail-bulk",
        "mail-bulk-2",
        "other",
    }
    assert Worker.objects.get(pk=running.identity.id).queues == ["mail*", "--exclude mail-bulk*"]


@pytest.mark.parametrize(
    ("queue", "wakes"), [("mail-a", True), (OWN_QUEUE, True), ("mail-bulk", False), ("other", False)]
)
def test_only_notifications_of_a_served_queue_wake_the_worker(queue, wakes):
    silent = WorkerUnderTest(queues=["mail*"], exclude=["mail-bulk"])
    silent.heartbeat.listener.ready(queue)
    assert silent.in_flight.fetcher_wakeup.is_set() is wakes


def claim(fetcher, count):
    """Claim so many tasks, of all functions."""
    assert fetcher.claimer._kinds() == ["sync", "async"]
    return fetcher.claimer.claim([("both", count)])


def test_cached_names_of_ready_queues_delay_no_task(monkeypatch):
    """The cache contains only one ready queue, which is empty by now."""
    fetcher = WorkerUnderTest().fetcher
    monkeypatch.setattr("django_pglock.worker.claiming.ready_queues.LIFETIME_FACTOR", 10**9)
    fill("a", 2)
    assert [claim.queue for claim in claim(fetcher, 2)] == ["a", "a"]
    fill("b", 1)
    assert [claim.queue for claim in claim(fetcher, 2)] == ["b"]
    fill("a", 1)
    assert [claim.queue for claim in claim(fetcher, 2)] == ["a"], "there was less than was asked for: forgotten"


def test_a_poll_that_found_nothing_is_not_repeated_at_once(monkeypatch):
    """A poll for coroutines alone reads past all tasks that wait for threads."""
    fetcher = WorkerUnderTest().fetcher
    monkeypatch.setattr("django_pglock.worker.claiming.ready_queues.LIFETIME_FACTOR", 10**9)
    fill("a", 2)
    assert len(claim(fetcher, 1)) == 1
    looks = []
    look = QueueCursor.claim
    monkeypatch.setattr(QueueCursor, "claim", lambda cursor, limit: looks.append(cursor.queue) or look(cursor, limit))
    assert fetcher.claimer.claim([("async", 1)]) == []
    assert (looks, fetcher.claimer.was_ready) == (["a"], True)


def test_a_poll_that_found_no_ready_queue_covers_fair_tasks(monkeypatch):
    """Otherwise a task that comes soon after others waits for the slower query for tasks with ``fair=``."""
    assert keyed_tasks.serve.fair
    looks, now = [], [0.0]
    look = queue_cursor.claim_fair
    monkeypatch.setattr(queue_cursor, "claim_fair", lambda *args, **more: looks.extend(now) or look(*args, **more))
    fetcher = WorkerUnderTest().fetcher
    assert claim(fetcher, 2) == []
    for cursors in fetcher.claimer._cursors.values():
        cursors.clock = lambda: now[0]
    for now[0] in (1.0, 1.06, 1.12, 1.18, 1.24):
        fill("a", 1)
        assert [each.queue for each in fetcher.claimer.claim([("both", 2)], notified={"a"})] == ["a"]
        assert claim(fetcher, 2) == []
    assert looks == [1.0], "the first look of a new cursor"


def test_many_queues_share_one_prepared_claim_statement(in_threads):
    """Prepared statements use memory of the server while the worker lives, and cursors memory of the worker."""
    tenants = [f"tenant {number}" for number in range(FEW_QUEUES + 20)]
    for tenant in tenants:
        fill(tenant, 1)

    def claim_all(_):
        fetcher = WorkerUnderTest(threads=1).fetcher
        fetcher.open()
        while claim(fetcher, 7):
            pass
        fill("the last", 1)
        assert len(claim(fetcher, 7)) == 1
        with connection.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM pg_prepared_statements")
            [prepared] = cursor.fetchone()
        return prepared, len(fetcher.claimer._cursors["both"]._queues)

    [(prepared, remembered)] = in_threads(claim_all, 1)
    assert not Task.objects.exclude(status="RUNNING").exists()
    assert prepared <= 3, "the queues that are ready, their claims, and their claims from a place on"
    assert remembered <= FEW_QUEUES


def test_the_poll_after_listening_covers_all_kinds_of_functions():
    """No worker was notified of a task that was enqueued before, so this poll has to find it."""
    fetcher = WorkerUnderTest(threads=2).fetcher
    fetcher.claimer.pauses.note("sync", took=0.0, found=0)
    assert fetcher.claimer.pauses.next_in("sync") > 0
    fetcher._sleep()
    assert fetcher.sleep.since is not None
    assert fetcher.claimer.pauses.next_in("sync") == 0


def test_the_last_poll_of_a_draining_worker_covers_all_kinds_of_functions():
    """A claim for coroutines alone may be postponed. A worker that ended meanwhile would leave these tasks."""
    fetcher = WorkerUnderTest(threads=2).fetcher
    fetcher.claimer.was_full = True
    fetcher.claimer.pauses.note("async", took=1.0, found=1)
    assert [kind for kind, _ in fetcher._prepare_poll(is_last_poll=False)] == ["sync"]
    assert [kind for kind, _ in fetcher._prepare_poll(is_last_poll=True)] == ["both"]


def test_what_was_claimed_begins_before_all_of_many_queues_are_read(monkeypatch):
    """With thousands of tenants' queues the threads would wait for seconds. Nothing that was read is read again."""
    monkeypatch.setattr(claimer, "LONGEST_CLAIM", 0.0)
    monkeypatch.setattr(ready_queues, "LONGEST_LIFETIME", 1e6)
    monkeypatch.setattr(ready_queues, "LIFETIME_FACTOR", 1e9)
    names = [f"tenant-{number}" for number in range(5)]
    for name in names:
        fill(name, 1)
    monkeypatch.setattr(registry, "has_fair", lambda: False)
    read = []
    look = QueueCursor.claim
    monkeypatch.setattr(QueueCursor, "claim", lambda cursor, limit: read.append(cursor.queue) or look(cursor, limit))
    fetcher = WorkerUnderTest().fetcher
    assert sorted([each.queue for each in claim(fetcher, 8)] for _ in names) == [[name] for name in names]
    assert claim(fetcher, 8) == []
    assert sorted(read) == names
