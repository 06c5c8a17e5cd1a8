"""Who holds what, by name."""

from __future__ import annotations

import pytest
from django.db import transaction

from django_pglock import LockNotAvailable, lock
from django_pglock.db import dedicated_connection
from django_pglock.keys import make_key
from django_pglock.models import AdvisoryLock, Worker
from tests.db.test_locks import Somebody, my_pid

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def somebody():
    other = Somebody()
    yield other
    other.connection.close()


@pytest.mark.parametrize("name", ["report", "order:5", "ünï %s 'quoted'", "negative key: b"])
def test_a_holder_is_shown_with_the_name_that_hashes_to_its_key(name):
    with transaction.atomic(), lock(name, shared=True, timeout=1):
        row = AdvisoryLock.objects.for_name(name).get()
        assert (row.key, row.mode, row.is_granted, row.pid) == (make_key(name).number, "shared", True, my_pid())
        assert (row.waiters, row.blocked_by) == (0, [])


def test_holder_and_waiter_are_named_and_joined(somebody, in_threads, eventually):
    """The holder's own statement does not tell the name; its waiter's does."""
    somebody.holds("contended")
    holder = somebody.ask("SELECT pg_backend_pid()")

    def wait_or_look(number):
        if number == 0:
            with pytest.raises(LockNotAvailable), lock("contended", timeout=2):
                pass
            return None
        return eventually(lambda: len(found := list(AdvisoryLock.objects.for_name("contended"))) == 2 and found)

    held, waiting = in_threads(wait_or_look, 2)[1]
    assert (held.is_granted, held.pid, held.name, held.waiters) == (True, holder, "contended", 1)
    assert (waiting.is_granted, waiting.name, waiting.blocked_by) == (False, "contended", [holder])
    assert waiting.since is not None


def test_a_name_that_does_not_hash_to_the_key_is_not_shown(somebody):
    """A session that holds two locks has its last statement about one of them."""
    with lock("first"), lock("second"):
        names = dict(AdvisoryLock.objects.filter(pid=my_pid()).values_list("key", "name"))
    assert set(names) == {make_key("first").number, make_key("second").number}
    assert names[make_key("first").number] is None


def test_a_workers_lock_is_named_after_the_worker(worker):
    running = worker()
    row = AdvisoryLock.objects.get(key=running.identity.lock_key)
    assert row.name == f"worker {Worker.objects.get().name}"


def test_people_find_a_lock_by_name_key_or_session(somebody):
    somebody.holds("order:5")
    pid = somebody.ask("SELECT pg_backend_pid()")
    key = make_key("order:5").number
    for text in ("order:5", str(key), str(pid)):
        assert [row.key for row in AdvisoryLock.objects.search(text)] == [key]
    for text in ("nothing", "", "9" * 40, "'; --", "\udcff"):
        assert key not in [row.key for row in AdvisoryLock.objects.search(text)] or text == ""


def test_only_sessions_with_advisory_locks_are_ended(somebody, eventually):
    """A process number that was used again must not hit a stranger."""
    innocent = dedicated_connection("default")
    try:
        with innocent.cursor() as cursor:
            cursor.execute("SELECT pg_backend_pid()")
            assert AdvisoryLock.objects.terminate(cursor.fetchone()[0]) is False
    finally:
        innocent.close()
    somebody.holds("a")
    assert AdvisoryLock.objects.terminate(somebody.ask("SELECT pg_backend_pid()")) is True
    eventually(lambda: not AdvisoryLock.objects.for_name("a").exists())
