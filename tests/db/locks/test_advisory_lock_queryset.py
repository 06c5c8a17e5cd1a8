"""The list of advisory locks, with their names."""

from __future__ import annotations

import pytest
from django.db import transaction

from django_pglock import LockNotAvailable, lock
from django_pglock.keys import make_key, reserved
from django_pglock.models import AdvisoryLock, Worker
from django_pglock.postgres.sessions import dedicated_connection
from django_pglock.testing import hold
from tests.db.locks.sessions import my_pid

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize("name", ["report", "order:5", "ünï %s 'quoted'", "negative key: b"])
def test_a_holder_is_shown_with_the_name_that_hashes_to_its_key(name):
    with transaction.atomic(), lock(name, shared=True, timeout=1):
        row = AdvisoryLock.objects.for_name(name).get()
        assert (row.key, row.mode, row.is_granted, row.pid) == (make_key(name).number, "shared", True, my_pid())
        assert (row.waiters, row.blocked_by) == (0, [])


def test_the_name_of_a_held_lock_is_found_by_the_statement_of_its_waiter(somebody, in_threads, eventually):
    """The current statement of the holder does not contain the name; the statement of the waiter does."""
    somebody.holds("contended")
    holder = somebody.ask("SELECT pg_backend_pid()")

    def wait_or_look(number):
        if number == 0:
            with lock("contended", timeout=300):
                return None
        try:
            return eventually(lambda: len(found := list(AdvisoryLock.objects.for_name("contended"))) == 2 and found)
        finally:
            somebody.leaves()

    held, waiting = in_threads(wait_or_look, 2)[1]
    assert (held.is_granted, held.pid, held.name, held.waiters) == (True, holder, "contended", 1)
    assert (waiting.is_granted, waiting.name, waiting.blocked_by) == (False, "contended", [holder])
    assert waiting.since is not None


def test_a_workers_lock_is_named_after_the_worker(worker):
    running = worker()
    row = AdvisoryLock.objects.get(name=f"worker {Worker.objects.get().name}")
    assert (row.application_name, row.key, row.pk) == (
        "lockworker heartbeat",
        None,
        f"{row.pid}-{reserved.WORKER}.{running.heartbeat.lock_key}-exclusive",
    )


def test_the_number_5_and_the_name_5_are_different_locks():
    with hold(5), hold("5"):
        shown = {row.key: str(row) for row in AdvisoryLock.objects.all()}
    assert shown == {5: "#5", make_key("5").number: "5"}
    with hold(5), pytest.raises(LockNotAvailable, match="'#5'"), lock(5, timeout=0):
        pass


def test_people_find_a_lock_by_name_key_or_session(somebody):
    somebody.holds("order:5")
    pid = somebody.ask("SELECT pg_backend_pid()")
    key = make_key("order:5").number
    for text in ("order:5", str(key), f"#{key}", str(pid)):
        assert [row.key for row in AdvisoryLock.objects.search(text)] == [key]
    for text in ("nothing", "", "9" * 40, "'; --", "\udcff"):
        assert key not in [row.key for row in AdvisoryLock.objects.search(text)] or text == ""


def test_only_sessions_with_advisory_locks_are_ended(somebody, eventually):
    """A reused process number must not end the session of another program."""
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
