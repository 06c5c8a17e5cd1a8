"""The list of advisory locks, with their names."""

from __future__ import annotations

import pytest
from django.db import connection, transaction
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

from django_pglock import LockNotAvailable, lock
from django_pglock.keys import make_key, reserved
from django_pglock.models import AdvisoryLock, Worker
from django_pglock.postgres.sessions import dedicated_connection
from django_pglock.testing import hold
from tests.db.locks.sessions import Somebody, my_pid
from tests.sample.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def somebody():
    other = Somebody()
    yield other
    other.leaves()


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


def test_holders_are_named_whatever_they_do_meanwhile(somebody):
    """PostgreSQL knows only numbers. A comment with the name is before each statement of the holder."""
    with lock("first 50%"), lock("second"):
        Effect.objects.filter(name="%").count()
        names = dict(AdvisoryLock.objects.filter(pid=my_pid()).values_list("key", "name"))
        # Also with other locks meanwhile. Another session queries, so the last statement of this one is that of the
        # lock.
        with lock("third"):
            seen = somebody.ask("SELECT count(*) FROM django_pglock_advisorylock WHERE name IN ('second', 'third')")
        assert seen == 2
        assert somebody.ask("SELECT count(*) FROM django_pglock_advisorylock WHERE name = 'second'") == 1
    assert names == {make_key("first 50%").number: "first 50%", make_key("second").number: "second"}
    assert len(connection.execute_wrappers) == 1, "one wrapper, forever"


def test_a_hint_for_the_planner_stays_the_first_comment():
    with CaptureQueriesContext(connection) as queries, lock("a"), connection.cursor() as cursor:
        cursor.execute("/*+ SeqScan(x) */ SELECT 1")
        cursor.execute("SELECT 2")
    assert queries.captured_queries[1]["sql"].startswith("/*+ SeqScan")
    assert queries.captured_queries[2]["sql"].startswith("/* django_pglock:")


@override_settings(DJANGO_PGLOCK={"LOCK_COMMENTS": False})
def test_names_can_be_kept_from_the_server():
    with CaptureQueriesContext(connection) as queries, lock("secret"):
        Effect.objects.count()
    assert "secret" not in str(queries.captured_queries)


def test_a_workers_lock_is_named_after_the_worker(worker):
    running = worker()
    row = AdvisoryLock.objects.get(name=f"worker {Worker.objects.get().name}")
    assert (row.application_name, row.key, row.pk) == (
        "lockworker heartbeat",
        None,
        f"{row.pid}-{reserved.WORKER}.{running.heartbeat.lock.number}-exclusive",
    )


def test_the_number_5_and_the_name_5_are_different_locks():
    with transaction.atomic(), lock(5, timeout=1), lock("5", timeout=1):
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
