"""What all handles have in common: their state, their errors, and what the log says."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import time

import pytest
from django.db import transaction
from django.test import override_settings

from django_pglock import Lease, LockLost, LockNotAvailable, lock, try_lock
from tests.db.locks.sessions import my_pid, statements_of

pytestmark = pytest.mark.django_db(transaction=True)


def test_lock_not_available_has_the_error_of_the_server_as_its_cause(somebody):
    somebody.holds("a")
    for context in (transaction.atomic(), lock("unrelated")):
        with context, pytest.raises(LockNotAvailable) as caught:
            lock("a", timeout=0.01).acquire()
        assert caught.value.sqlstate == "55P03"
        assert caught.value.__cause__.__cause__.sqlstate == "55P03"
    with pytest.raises(LockNotAvailable) as caught:
        lock("a", timeout=0).acquire()
    assert (caught.value.sqlstate, caught.value.__cause__) == (None, None)
    assert pickle.loads(pickle.dumps(caught.value)).name == "a"


@pytest.mark.parametrize("make", [lock, try_lock, Lease])
def test_a_released_or_never_acquired_lock_is_not_reported_as_lost(make, somebody):
    with make("a") as handle:
        pass
    with pytest.raises(LockLost, match="'a' is not held: it was released"):
        handle.assert_held()
    somebody.holds("busy")
    with pytest.raises(LockLost, match="Lock 'busy' is not held: it was never acquired"):
        try_lock("busy").acquire().assert_held()


def test_a_lost_lock_is_reported_as_lost_afterwards(somebody):
    with pytest.raises(LockLost, match="session has ended"), lock("a") as handle:
        somebody.ends_session(my_pid())
    with pytest.raises(LockLost, match=r"session has ended.*Another session may have held it"):
        handle.assert_held()


@pytest.mark.parametrize("take", [lock("a"), Lease("a", ttl=5)])
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_handle_cannot_be_copied_or_pickled(take, duplicate):
    """The copy would free the lock when Python deletes the copy."""
    with take as handle:
        with pytest.raises(TypeError, match="'a' cannot be copied or pickled, because its handle owns it"):
            duplicate(handle)
        gc.collect()
        handle.assert_held()


def messages(caplog, level):
    return [record for record in caplog.records if record.name == "django_pglock.locks" and record.levelno == level]


def test_short_waits_and_holds_are_not_logged_at_info(caplog):
    with caplog.at_level(logging.INFO), lock("a"):
        pass
    assert caplog.records == []
    with caplog.at_level(logging.DEBUG), lock("a"):
        pass
    assert [record.lock for record in messages(caplog, logging.DEBUG)] == ["a", "a"]


@override_settings(DJANGO_PGLOCK={"SLOW_LOCK": 0.05})
def test_long_waits_and_holds_are_warned_of(somebody, in_threads, caplog, eventually):
    somebody.holds("a")
    waited = "SELECT count(*) FROM pg_locks WHERE NOT granted AND waitstart < clock_timestamp() - interval '60 ms'"

    def work(number):
        if number == 0:
            eventually(lambda: somebody.ask(waited), why="nobody waits")
            somebody.leaves()
        else:
            with lock("a"):
                time.sleep(0.51)

    in_threads(work, 2)
    took, gave_back = messages(caplog, logging.WARNING)
    assert took.waited > 0.05
    assert gave_back.held > 0.5, "people work under a lock: ten times as long is long"
    assert "Acquired lock 'a'" in took.getMessage()
    assert "longer than 0.5 s" in gave_back.getMessage()


def test_the_error_names_the_holder_on_request(somebody):
    somebody.holds("a")
    pid = somebody.ask("SELECT pg_backend_pid()")
    with pytest.raises(LockNotAvailable) as caught, lock("a", timeout=0):
        pass
    assert statements_of(caught.value.holders) == 1
    [holder] = caught.value.holders()
    assert (holder.pid, holder.name) == (pid, "a"), "the name that was asked for, which this holder has not written"
    assert pid != my_pid()
