"""The statement that locks the first free rows of a queryset and changes them, on tables of the user."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import OperationalError, connection, connections, transaction
from django.db.models import BooleanField, F, Func, Value
from django.test.utils import CaptureQueriesContext

from django_pglock import lock
from django_pglock.keys import make_key
from django_pglock.models import Task
from django_pglock.store.marking import first_free, mark
from tests.conftest import NEVER
from tests.sample.models import Express, Letter, Parcel, Rack, Sender
from tests.sql import execute_sql

pytestmark = pytest.mark.django_db

FREE = [Parcel.Status.NEW, Parcel.Status.RETURNED]
TAKEN = Parcel.Status.TAKEN


@pytest.fixture
def parcels():
    """Return ten free parcels of one sender."""
    sender = Sender.objects.create(name="a shop")
    Parcel.objects.bulk_create(Parcel(sender=sender, weight=n, status=FREE[n % 2]) for n in range(10))
    return Parcel.objects.filter(status__in=FREE, sender__name="a shop").order_by("weight")


def weights(rows):
    return [row.weight for row in rows]


def test_marking_takes_the_limit_in_order_and_returns_the_rows_as_they_are_now(letters):
    new = Letter.objects.filter(status="new").order_by("-urgency", "id")
    expected = [letter.pk for letter in new[:4]]
    claimed = new.claim_update(4, status="taken", attempts=F("attempts") + 1)
    assert [letter.pk for letter in claimed] == expected
    assert {(letter.status, letter.attempts) for letter in claimed} == {("taken", 1)}
    assert Letter.objects.filter(status="taken").count() == 4
    assert Letter.objects.filter(attempts=1).count() == 4


def test_without_a_limit_all_rows_are_marked_once(parcels):
    assert weights(parcels.claim_update(None, status=TAKEN)) == [*range(10)]
    assert parcels.claim_update(None, status=TAKEN) == []


def test_marking_is_one_statement(letters):
    with CaptureQueriesContext(connection) as queries:
        Letter.objects.filter(status="new").order_by("id").claim_update(3, status="taken")
    assert len(queries) == 1, queries.captured_queries


def test_a_set_that_cannot_match_is_an_empty_answer(letters):
    assert Letter.objects.none().claim_update(3, status="taken") == []
    assert Letter.objects.filter(pk__in=[]).claim_update(3, status="taken") == []
    for verb in ("retry", "cancel", "run_now", "reset_stuck"):
        assert getattr(Task.objects.none(), verb)() == 0


def test_rows_of_the_parent_of_a_model_are_marked():
    sender = Sender.objects.create(name="a")
    express = [Express.objects.create(sender=sender, weight=weight) for weight in range(3)]
    parcels = Parcel.objects.filter(express__in=express).order_by("pk")
    assert [each.pk for each in parcels.claim_update(2, status="taken")] == [each.pk for each in express[:2]]


def test_rows_with_a_key_of_two_columns_are_marked():
    """The limit falls inside an aisle, and both aisles have the same numbers."""
    Rack.objects.bulk_create(Rack(aisle=aisle, number=n) for n in range(4) for aisle in "ab")
    rows = Rack.objects.filter(status="new").order_by("-number", "aisle")
    assert [row.pk for row in rows.claim_update(3, status="taken")] == [("a", 3), ("b", 3), ("a", 2)]
    assert {row.pk for row in Rack.objects.filter(status="taken")} == {("a", 3), ("b", 3), ("a", 2)}
    with rows.claim(1) as held:
        assert held[0].pk == ("b", 2)


class Replica:
    """Routes reads to a database that does not exist."""

    def db_for_read(self, model, **hints):
        return "replica"

    def db_for_write(self, model, **hints):
        return "default"


def test_marking_writes_to_the_write_database_of_the_router(parcels, settings):
    settings.DATABASE_ROUTERS = [f"{__name__}.Replica"]
    assert {row._state.db for row in parcels.claim_update(2, status=TAKEN)} == {"default"}


# Beside other sessions


def test_a_filter_over_another_table_locks_only_the_rows_that_are_moved(parcels):
    """Otherwise the rows of one client would block all other clients from rows of the same sender."""
    with CaptureQueriesContext(connection) as queries:
        assert len(parcels.claim_update(1, status=TAKEN)) == 1
        with parcels.claim(1):
            pass
    locking = [query["sql"] for query in queries if "FOR UPDATE" in query["sql"]]
    assert len(locking) == 2
    assert all('FOR UPDATE OF "sample_parcel" SKIP LOCKED' in sql for sql in locking)


@pytest.mark.django_db(transaction=True)
def test_a_locked_row_of_another_table_blocks_no_claim(parcels, in_threads):
    with transaction.atomic():
        Sender.objects.select_for_update().get()
        [moved] = in_threads(lambda _: parcels.claim_update(2, status=TAKEN), 1)
    assert len(moved) == 2


@pytest.mark.django_db(transaction=True)
def test_locked_rows_are_passed_over_and_no_more_than_the_limit_are_changed(letters, in_threads):
    new = Letter.objects.filter(status="new").order_by("id")
    with new.claim(2) as held:
        [changed] = in_threads(lambda _: mark(first_free(new, 3), {"status": "taken"}, "id", "status"), 1)
    assert sorted(changed) == [(each.pk, "taken") for each in letters[2:5]]
    assert [each.pk for each in held] == [each.pk for each in letters[:2]]
    assert Letter.objects.filter(status="taken").count() == 3


@pytest.mark.django_db(transaction=True)
def test_a_row_of_which_only_the_key_is_locked_is_free_if_the_key_stays(letters, in_threads):
    """As while another transaction writes a row with a foreign key to it."""
    new = Letter.objects.filter(status="new").order_by("id")
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SELECT FROM sample_letter WHERE id = %s FOR KEY SHARE", [letters[0].pk])
        for free, options in ((letters[1], {}), (letters[0], {"no_key": True})):
            found = in_threads(lambda _, options=options: mark(first_free(new, 1, **options), {"attempts": 1}, "id"), 1)
            assert found == [[(free.pk,)]]


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(("change", "moved"), [({"status": "lost"}, []), ({"attempts": 7}, [("taken", 8)])])
def test_rows_that_have_changed_since_the_snapshot_are_checked_again(parcels, eventually, change, moved):
    """The statement has read the row and waits for a lock. Meanwhile another session changes the row and commits."""
    gate = Func(
        Value(make_key("gate").number),
        template="pg_advisory_xact_lock(%(expressions)s) IS NOT NULL",
        output_field=BooleanField(),
    )
    rows = parcels.filter(weight=0).filter(gate)
    with ThreadPoolExecutor(1) as thread:
        with lock("gate"):
            answer = thread.submit(closing(lambda: rows.claim_update(1, status=TAKEN, attempts=F("attempts") + 1)))
            eventually(lambda: waiters("gate"))
            Parcel.objects.filter(weight=0).update(**change)
        assert [(row.status, row.attempts) for row in answer.result(NEVER)] == moved


def closing(function):
    """Return a function that closes the connections of its thread at the end."""

    def call():
        try:
            return function()
        finally:
            connections.close_all()

    return call


def waiters(name):
    key = make_key(name).number
    with connection.cursor() as cursor:
        cursor.execute(
            """SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted
               AND (classid::bigint << 32) | objid::bigint = %s""",
            [key],
        )
        return cursor.fetchone()[0]


@pytest.mark.django_db(transaction=True)
def test_at_repeatable_read_a_row_that_has_changed_since_the_snapshot_is_an_error(parcels, in_threads):
    """PostgreSQL can use neither the new version of the row nor the old one, and raises an error."""
    with pytest.raises(OperationalError, match="could not serialize access"), transaction.atomic():
        execute_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        assert parcels.count() == 10
        in_threads(lambda _: Parcel.objects.update(attempts=1), 1)
        parcels.claim_update(1, status=TAKEN)
    assert not Parcel.objects.filter(status=TAKEN).exists()
