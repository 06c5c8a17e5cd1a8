"""Leases: an owner, an end, a token that only grows, and a holder who notices."""

from __future__ import annotations

import asyncio
import threading
import time
from datetime import timedelta

import pytest
from django.db import DatabaseError, connection, transaction
from django.db.backends.signals import connection_created
from django.test import TestCase
from django.test.utils import CaptureQueriesContext

from django_pglock import Lease, LockError, LockKeyError, LockLost, LockNotAvailable, leader, signals
from django_pglock.locks.leases import holder, thread
from django_pglock.models import Lease as Row
from tests.conftest import NEVER
from tests.db.locks.test_api import Somebody
from tests.db.locks.test_api import somebody as somebody  # a fixture
from tests.sample.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)


def now():
    with connection.cursor() as cursor:
        cursor.execute("SELECT clock_timestamp()")
        return cursor.fetchone()[0]


def sessions_of_leases():
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%%django_pglock_lease%%'"
            " AND pid <> pg_backend_pid()"
        )
        return cursor.fetchone()[0]


# Taking, giving back


@pytest.mark.parametrize("ttl", [None, 60, timedelta(minutes=1)])
def test_one_holder_at_a_time_and_a_token_that_grows(ttl):
    with Lease("nightly", 5, ttl=ttl) as lease:
        assert (lease.name, lease.token, bool(lease)) == ("nightly:5", 1, True)
        lease.assert_held()
        with pytest.raises(LockNotAvailable) as caught, Lease("nightly", 5, ttl=ttl):
            pytest.fail("two at once")
        [holder] = caught.value.holders()
        assert (holder.name, holder.owner, holder.token) == ("nightly:5", lease.owner, 1)
        assert (holder.expires_at is None) == (ttl is None)
    assert not lease
    with Lease("nightly", 5, ttl=ttl) as lease:
        assert lease.token == 2
    assert Row.objects.held().count() == 0
    with pytest.raises(LockError, match="not held"):
        lease.release()


def test_nothing_depends_on_the_transaction_around_it():
    """Rolled back with it, somebody else would get the same token."""
    with pytest.raises(ZeroDivisionError), transaction.atomic(), Lease("a", ttl=5):
        1 / 0  # noqa: B018
    with transaction.atomic(), CaptureQueriesContext(connection) as queries, Lease("a", ttl=5) as lease:
        assert lease.token == 2
    assert len(queries) == 0


class InsideTestCase(TestCase):
    def test_a_lease_works_there(self):
        with Lease("in a test case", ttl=5), self.assertRaises(LockNotAvailable), Lease("in a test case"):
            pass
        # By somebody else: the row was not written in this test's transaction, so it would outlive it.
        other = Somebody()
        with other.connection.cursor() as cursor:
            cursor.execute("DELETE FROM django_pglock_lease")
        other.leaves()


def test_a_decorated_function_and_a_busy_one():
    @Lease("report:{name}", ttl=5, on_busy="skip")
    def report(name):
        return Row.objects.get(name=f"report:{name}").token

    assert [report("x"), report("x"), report("y")] == [1, 2, 1]
    with Lease("report:x"):
        assert report("x") is None


def test_it_is_kept_from_others_for_at_least_min_hold():
    """Two hosts start a nightly job by clocks that differ by less; the job takes no time at all."""
    with Lease("nightly", ttl=60, min_hold=5):
        first = Row.objects.get().acquired_at
    with pytest.raises(LockNotAvailable), Lease("nightly", ttl=60):
        pass
    with Lease("nightly", ttl=60, timeout=60):
        assert Row.objects.get().acquired_at - first >= timedelta(seconds=5)


@pytest.mark.parametrize("ttl", [0, -1, 0.1, "1", True])
def test_a_lifetime_that_is_none_is_refused(ttl):
    with pytest.raises(ValueError, match="ttl"):
        Lease("a", ttl=ttl)
    with pytest.raises(ValueError, match="needs a ttl"):
        leader("a", ttl=None)


@pytest.mark.parametrize("name", [None, "", 1.5])
def test_a_name_that_is_none_is_refused(name):
    with pytest.raises(LockKeyError):
        Lease(name)


@pytest.mark.parametrize("name", ["quote ' and %s %(key)s", "*/; --", "x" * 10_000, 5, "\u202e"])
def test_any_name_is_only_a_name(name):
    with Lease(name, ttl=5), pytest.raises(LockNotAvailable), Lease(name):
        pass


# Time


def test_it_is_renewed_for_as_long_as_it_is_held():
    with Lease("long", ttl=6) as lease:
        first = Row.objects.get()
        while now() < first.expires_at:
            lease.assert_held()
            with pytest.raises(LockNotAvailable), Lease("long"):
                pass
            time.sleep(0.05)
        row = Row.objects.get()
        assert (row.token, row.holder, row.acquired_at) == (first.token, first.holder, first.acquired_at)
        assert row.renewed_at > first.renewed_at
    assert not lease.lost.is_set()


def test_extend_puts_the_end_off():
    with Lease("long", ttl=5) as lease:
        lease.extend(500)
        assert Row.objects.get().expires_at - now() > timedelta(seconds=450)
        lease.extend()
        assert Row.objects.get().ttl == timedelta(seconds=500)
    with Lease("endless") as lease, pytest.raises(LockError, match="no end"):
        lease.extend(5)


def test_one_that_is_to_last_for_less_is_renewed_sooner(eventually):
    with Lease("long", ttl=60) as lease:
        lease.extend(6)
        with pytest.raises(ValueError, match=r"0\.3"):
            lease.extend(0)
        first = Row.objects.get()
        eventually(lambda: now() > first.expires_at)
        lease.assert_held()
        assert Row.objects.get().ttl == timedelta(seconds=6)


def test_a_holder_that_died_is_followed_when_its_time_is_over(monkeypatch):
    """As soon as it ends, not at the next look, which would come after the timeout."""
    monkeypatch.setattr("django_pglock.locks.leases.holder.POLL_INTERVAL", 600.0)
    with Lease("a", ttl=60) as lease:
        pass
    Row.objects.update(released_at=None, expires_at=now() + timedelta(seconds=5), holder=lease._holder._id)
    with pytest.raises(LockNotAvailable), Lease("a", ttl=5):
        pass
    with Lease("a", ttl=60, timeout=60) as lease:
        assert lease.token == 2


# Lost


def test_a_lease_that_was_taken_away_is_noticed(eventually):
    heard = []
    signals.lock_lost.connect(receiver := lambda sender, handle, **kwargs: heard.append(handle.name))
    try:
        with pytest.raises(LockLost, match="taken away"), Lease("a", ttl=3) as lease:
            assert Row.objects.all().free() == 1
            assert lease.lost.wait(60)
            with pytest.raises(LockLost):
                lease.assert_held()
            with pytest.raises(LockLost):
                lease.extend()
    finally:
        signals.lock_lost.disconnect(receiver)
    assert heard == ["a"]
    with pytest.raises(ZeroDivisionError), Lease("a", ttl=0.6):
        Row.objects.all().free()
        1 / 0  # noqa: B018
    with pytest.raises(LockLost), Lease("mutex"):
        Row.objects.all().free()


def test_what_can_not_be_renewed_is_lost_when_its_time_is_over(somebody):
    """The row is locked by somebody, so that renewals hang: the holder does not wait for them."""
    with pytest.raises(LockLost, match=r"could not be renewed for 2 s"), Lease("a", ttl=2) as lease:
        with somebody.connection.cursor() as cursor:
            cursor.execute("BEGIN; SELECT 1 FROM django_pglock_lease FOR UPDATE")
        assert lease.lost.wait(60)
        with somebody.connection.cursor() as cursor:
            cursor.execute("ROLLBACK")


def end_sessions(somebody):
    somebody.ask(
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
        " WHERE query LIKE '%%django_pglock_lease%%' AND pid <> pg_backend_pid()"
    )


def test_a_session_that_was_ended_costs_no_lease(somebody):
    with Lease("a", ttl=6) as lease:
        first = Row.objects.get()
        while now() < first.expires_at:
            end_sessions(somebody)
            time.sleep(1)
        lease.assert_held()
    assert not lease.lost.is_set()


def test_a_leader_steps_down_at_the_first_doubt(somebody):
    """Long before the lease ends and another could be elected: for that, the reason would name its six seconds."""
    with pytest.raises(LockLost, match=r"could not be renewed \("), leader("a", ttl=6) as leadership:
        with somebody.connection.cursor() as cursor:
            cursor.execute("BEGIN; SELECT 1 FROM django_pglock_lease FOR UPDATE")
        assert leadership.lost.wait(60)
        with somebody.connection.cursor() as cursor:
            cursor.execute("ROLLBACK")


def test_a_stopped_holder_looks_at_the_clock_before_its_keeper_does():
    with pytest.raises(LockLost), Lease("a", ttl=60) as lease:
        lease._holder._deadline = holder.boottime()
        assert not lease
        assert not lease.is_held
        with pytest.raises(LockLost):
            lease.assert_held()
        lease._holder._lose("test")


def test_the_token_keeps_out_what_a_holder_writes_too_late():
    """The pattern of the documentation: the row takes no token that is smaller than the one it has seen."""
    Effect.objects.create(name="report", number=0)

    def write(token):
        return Effect.objects.filter(name="report", number__lte=token).update(number=token, name="report")

    with pytest.raises(LockLost), Lease("report", ttl=60) as old:
        Row.objects.all().free()  # what the end of its time does to a holder that is stopped
        with Lease("report", ttl=60) as new:
            assert write(new.token) == 1
            assert write(old.token) == 0, "the late one is refused"


# Waiting


def test_who_waits_is_woken_when_the_leader_resigns(in_threads, monkeypatch):
    """By a notification: the next look would come when the lease ends."""
    monkeypatch.setattr("django_pglock.locks.leases.holder.POLL_INTERVAL", 600.0)
    elected, entered = threading.Event(), []

    def lead(number):
        if number:
            elected.wait(60)
        with leader("a", ttl=300) as leadership:
            entered.append(leadership.token)
            elected.set()
            if not number:
                time.sleep(0.55)

    in_threads(lead, 2)
    assert entered == [1, 2]


def test_many_candidates_lead_one_after_another(in_threads, eventually):
    leading, tokens = [], []

    def lead(number):
        for _ in range(5):
            with leader("a", ttl=30) as leadership:
                leading.append(number)
                assert len(leading) == 1
                tokens.append(leadership.token)
                leading.remove(number)

    in_threads(lead, 4)
    assert tokens == list(range(1, 21))
    eventually(lambda: sessions_of_leases() == 0, why="nobody has a lease, and sessions stay open")


def test_a_wait_that_times_out(monkeypatch):
    monkeypatch.setattr("django_pglock.locks.leases.holder.POLL_INTERVAL", 600.0)
    with Lease("a", ttl=300):
        began = time.monotonic()
        with pytest.raises(LockNotAvailable, match=r"0\.3 s"), leader("a", timeout=0.3):
            pass
        assert 0.3 <= time.monotonic() - began < NEVER


# Coroutines


def test_coroutines_hold_leases_too():
    async def compete(inside):
        async with Lease("a", ttl=30, timeout=60) as lease:
            inside.append(1)
            assert len(inside) == 1
            await asyncio.sleep(0.001)
            inside.pop()
            return lease.token

    async def main():
        inside = []
        tokens = await asyncio.gather(*[compete(inside) for _ in range(8)])
        assert sorted(tokens) == list(range(1, 9))
        async with leader("b") as leadership:
            await leadership.extend(30)
            with pytest.raises(LockNotAvailable):
                async with Lease("b"):
                    pass
        waiting = asyncio.create_task(leadership.until_lost())
        await asyncio.wait_for(waiting, 60)
        assert await Lease("c", ttl=5)(_token)() is None

    async def _token():
        return None

    asyncio.run(main())
    assert Row.objects.held().count() == 0


def test_a_cancelled_candidate_leaves_no_lease(eventually):
    async def main():
        async with Lease("a", ttl=30):
            waiting = asyncio.create_task(leader("a").aacquire())
            await asyncio.sleep(0.1)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        for number in range(20):
            taking = asyncio.create_task(Lease("hot").aacquire())
            await asyncio.sleep(number * 0.0003)
            if not taking.cancel():
                await (await taking).release()
            await asyncio.gather(taking, return_exceptions=True)

    asyncio.run(main())
    eventually(lambda: not Row.objects.held().exists(), why="a mutex nobody knows of is held for ever")
    eventually(lambda: sessions_of_leases() == 0)


def test_an_answer_that_is_lost_leaves_no_lease(somebody, monkeypatch):
    """Without a ttl, a lease that was taken by a statement whose answer never came would be held for ever."""
    ask = thread.LeaseThread.ask

    async def cut(self, alias, statement, params, **options):
        row = await ask(self, alias, statement, params, **options)
        if "INSERT" in statement:
            raise DatabaseError("the connection was cut")
        return row

    monkeypatch.setattr(thread.LeaseThread, "ask", cut)
    with pytest.raises(DatabaseError, match="cut"), Lease("a"):
        pass
    monkeypatch.undo()
    with Lease("a") as lease:
        assert lease.token == 2


# What a lease is tied to, and what stands between it and the server


def test_a_lease_whose_handle_is_dropped_is_given_back(caplog, eventually):
    Lease("a", ttl=60).acquire()
    eventually(lambda: not Row.objects.held().exists())
    assert "Lease 'a' was freed because its handle was dropped" in caplog.text


def test_an_abandoned_generator_gives_its_lease_back(eventually):
    one = Lease("a", ttl=60)

    def numbers():
        with one:
            yield 1

    next(numbers())
    eventually(lambda: not Row.objects.held().exists())

    async def anumbers():
        async with one:
            yield 1

    async def take_one():
        async for number in anumbers():
            return number

    async def main():
        await asyncio.create_task(take_one())
        deadline = time.monotonic() + NEVER
        while await asyncio.to_thread(_is_held):
            assert time.monotonic() < deadline, "the lease is renewed for ever"
            await asyncio.sleep(0.01)

    asyncio.run(main())


def _is_held():
    try:
        return Row.objects.held().exists()
    finally:
        connection.close()


def test_the_bodys_own_exception_is_kept_when_the_lease_cannot_be_given_back(monkeypatch, caplog):
    monkeypatch.setattr(holder, "RELEASE_RETRY_DELAYS", ())
    monkeypatch.setattr(holder, "RELEASE", "SELECT 1 / 0")

    async def main():
        with pytest.raises(ZeroDivisionError, match="mine"):
            async with Lease("b"):
                raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"), Lease("a"):
        raise ZeroDivisionError("mine")
    asyncio.run(main())
    assert caplog.text.count("could not be released (division by zero)") == 2
    with pytest.raises(LockError, match="could not be released"), Lease("c"):
        pass


def test_the_time_in_which_the_machine_sleeps_counts(monkeypatch):
    with pytest.raises(LockLost), Lease("a", ttl=30) as lease:
        before = holder.boottime
        monkeypatch.setattr(holder, "boottime", lambda: before() + 31)
        assert not lease
        with pytest.raises(LockLost):
            lease.assert_held()
        monkeypatch.undo()
        lease._holder._lose("test")
    if hasattr(time, "CLOCK_BOOTTIME"):
        monkeypatch.setattr(time, "clock_gettime", {time.CLOCK_BOOTTIME: 5.0}.__getitem__)
        assert holder.boottime() == 5.0


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_leases_are_taken_at_read_committed_whatever_the_role_says(level, in_threads):
    """Above it, one of two who ask at the same time would meet an error."""
    execute(f"ALTER ROLE CURRENT_USER SET default_transaction_isolation = '{level}'")
    try:

        def work(number):
            for _ in range(10):
                with Lease("hot", ttl=60, timeout=60):
                    pass

        in_threads(work, 4)
    finally:
        execute("ALTER ROLE CURRENT_USER RESET default_transaction_isolation")


def execute(sql):
    with connection.cursor() as cursor:
        cursor.execute(sql)


def test_sessions_of_leases_pass_through_what_django_does_with_a_connection():
    seen = []

    def greet(sender, connection, **kwargs):
        seen.append(sender)

    connection_created.connect(greet)
    try:
        with Lease("a"):
            pass
    finally:
        connection_created.disconnect(greet)
    assert seen
