"""Locks between threads, each with a database session of its own."""

from __future__ import annotations

import threading
import time

import pytest
from django.db import transaction

from django_pglock import LockNotAvailable, lock, try_lock
from tests.concurrency.locks.sessions import rows
from tests.sample.models import Effect
from tests.sql import execute_sql

pytestmark = pytest.mark.django_db(transaction=True)


def locks_held():
    return sum(rows())


class Section:
    """A critical section. It counts the threads that are inside."""

    def __init__(self) -> None:
        self.inside = 0
        self.most = 0
        self.visits = 0
        self._guard = threading.Lock()

    def __enter__(self):
        with self._guard:
            self.inside += 1
            self.visits += 1
            self.most = max(self.most, self.inside)

    def __exit__(self, *error):
        with self._guard:
            self.inside -= 1


def test_one_decorator_object_under_many_threads(in_threads):
    """The popular package keeps "did I get it?" on the shared object: a loser wipes the winner's answer, and the lock
    is never freed again."""
    section = Section()

    @lock("shared-decorator", timeout=0, on_busy="skip")
    def visit():
        with section:
            time.sleep(0.001)
        return True

    runs = in_threads(lambda _: [visit() for _ in range(50)].count(True), 8)
    assert section.most == 1
    assert section.visits == sum(runs) > 0
    assert locks_held() == 0
    assert visit() is True


def test_one_lock_object_made_at_import_under_many_threads(in_threads):
    section = Section()
    shared = lock("shared-object")

    def visit(_):
        for _ in range(20):
            with shared, section:
                pass

    in_threads(visit, 8)
    assert (section.most, section.visits) == (1, 160)
    assert locks_held() == 0


@pytest.mark.parametrize("scope", ["auto", "transaction"])
def test_no_update_is_lost_behind_a_lock_in_a_transaction(in_threads, scope):
    """A session lock freed before the commit loses half of these increments; the automatic scope loses none."""
    Effect.objects.create(name="counter")

    def add(_):
        for _ in range(25):
            with transaction.atomic(), lock("counter", scope=scope):
                effect = Effect.objects.get(name="counter")
                effect.number += 1
                effect.save()

    in_threads(add, 8)
    assert Effect.objects.get(name="counter").number == 200
    assert locks_held() == 0


def test_a_storm_of_timeouts_leaves_nothing_held(in_threads):
    """PostgreSQL sometimes reports a timeout although it granted the lock in that moment; such a lock must not stay."""
    outcomes = []

    def storm(_):
        for _ in range(300):
            try:
                with lock("contended", timeout=0.001):
                    time.sleep(0.001)
                outcomes.append("held")
            except LockNotAvailable:
                outcomes.append("busy")
        # Before the session of the thread ends, because a leaked lock would end with the session.
        return execute_sql("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()")[0][0]

    assert in_threads(storm, 8) == [0] * 8
    assert outcomes.count("busy") > 100, "the test did not provoke what it is about"
    assert outcomes.count("held") > 0


def test_shared_holders_are_together_and_an_exclusive_one_is_alone(in_threads):
    inside = threading.Barrier(4)

    def read(_):
        with lock("book", shared=True):
            inside.wait(60)
            with try_lock("book") as held:
                was_held = bool(held)
            inside.wait(60)  # no thread releases before all threads have tried
        return was_held

    assert in_threads(read, 4) == [False] * 4
