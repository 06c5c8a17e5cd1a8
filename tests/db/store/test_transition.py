"""Moving rows of a table of the user from some statuses to another one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import OperationalError, connection, connections, transaction
from django.db.models import BooleanField, F, Func, Value
from django.db.models.functions import Now
from django.test.utils import CaptureQueriesContext

from django_pglock import lock
from django_pglock.keys import make_key
from tests.conftest import NEVER
from tests.sample.models import Parcel, Rack, Sender

pytestmark = pytest.mark.django_db

FREE = [Parcel.Status.NEW, Parcel.Status.RETURNED]
TAKEN = Parcel.Status.TAKEN


@pytest.fixture
def parcels():
    """Ten parcels; those with an even weight are new, the others have been returned."""
    sender = Sender.objects.create(name="a shop")
    return Parcel.objects.bulk_create(Parcel(sender=sender, weight=n, status=FREE[n % 2]) for n in range(10))


def weights(rows):
    return [row.weight for row in rows]


def test_transition_updates_rows_in_order_up_to_the_limit_and_returns_them(parcels):
    Parcel.objects.filter(weight=8).update(status="lost")
    moved = Parcel.objects.order_by("-weight").transition(
        from_=FREE, to=TAKEN, limit=3, attempts=F("attempts") + 1, taken_at=Now()
    )
    assert weights(moved) == [9, 7, 6]
    assert {(row.status, row.attempts) for row in moved} == {("taken", 1)}
    assert all(row.taken_at is not None for row in moved)
    stored = Parcel.objects.filter(status=TAKEN).order_by("-weight")
    assert [(row.weight, row.attempts, row.taken_at) for row in stored] == [
        (r.weight, r.attempts, r.taken_at) for r in moved
    ]


def test_transition_without_a_limit_updates_all_rows_of_the_queryset(parcels):
    moved = Parcel.objects.filter(weight__lt=6).transition(from_=["new"], to="lost")
    assert sorted(weights(moved)) == [0, 2, 4]
    assert Parcel.objects.filter(status="lost").count() == 3


def test_transition_does_not_update_rows_twice(parcels):
    assert len(Parcel.objects.transition(from_=FREE, to=TAKEN, limit=10)) == 10
    assert Parcel.objects.transition(from_=FREE, to=TAKEN, limit=10) == []


def test_transition_sends_one_statement(parcels):
    with CaptureQueriesContext(connection) as queries:
        Parcel.objects.order_by("id").transition(from_=FREE, to=TAKEN, limit=3)
    assert len(queries) == 1, queries.captured_queries


def test_transition_takes_a_single_status_and_another_field(parcels):
    assert len(Parcel.objects.transition(from_="new", to="lost", limit=2)) == 2
    assert len(Parcel.objects.transition(from_=0, to=1, limit=4, field="attempts")) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"from_": ["nwe"], "to": "taken"},
            r"'nwe' is not a value of Parcel\.status; its values are 'new', 'returned'",
        ),
        ({"from_": ["new"], "to": "tkaen"}, r"'tkaen' is not a value of Parcel\.status"),
        ({"from_": [], "to": "taken"}, "one or more statuses"),
        ({"from_": ["new", None], "to": "taken"}, "None"),
        ({"from_": ["new", "taken"], "to": "taken"}, "'taken' is both in from_"),
        ({"from_": ["new"], "to": F("status")}, "is not a value"),
        ({"from_": [0], "to": F("weight"), "field": "attempts"}, "expression"),
        ({"from_": ["new"], "to": "taken", "status": "lost"}, "status"),
        ({"from_": ["new"], "to": "taken", "limit": 0}, "limit of a claim"),
        ({"from_": ["new"], "to": "taken", "limit": True}, "limit of a claim"),
    ],
)
def test_an_invalid_transition_is_refused(parcels, arguments, message):
    with pytest.raises(ValueError, match=message):
        Parcel.objects.transition(**arguments)
    assert Parcel.objects.filter(status__in=FREE).count() == 10


def test_a_set_that_cannot_match_is_an_empty_answer(parcels):
    assert Parcel.objects.none().transition(from_=FREE, to=TAKEN) == []


def test_a_filter_over_another_table_locks_only_the_rows_that_are_moved(parcels, eventually):
    """Otherwise the rows of one client would block all other clients from rows of the same sender."""
    rows = Parcel.objects.filter(sender__name="a shop")
    with CaptureQueriesContext(connection) as queries:
        assert len(rows.transition(from_=FREE, to=TAKEN, limit=1)) == 1
        with rows.claim(1):
            pass
    locking = [query["sql"] for query in queries if "FOR UPDATE" in query["sql"]]
    assert len(locking) == 2
    assert all('FOR UPDATE OF "sample_parcel" SKIP LOCKED' in sql for sql in locking)


@pytest.mark.django_db(transaction=True)
def test_transition_skips_locked_rows(parcels, in_threads):
    with transaction.atomic():
        Parcel.objects.select_for_update().get(weight=0)
        [moved] = in_threads(lambda _: Parcel.objects.order_by("weight").transition(from_=FREE, to=TAKEN, limit=2), 1)
    assert weights(moved) == [1, 2]


@pytest.mark.django_db(transaction=True)
def test_a_locked_row_of_another_table_blocks_no_transition(parcels, in_threads):
    rows = Parcel.objects.filter(sender__name="a shop")
    with transaction.atomic():
        Sender.objects.select_for_update().get()
        [moved] = in_threads(lambda _: rows.transition(from_=FREE, to=TAKEN, limit=2), 1)
    assert len(moved) == 2


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(("change", "moved"), [({"status": "lost"}, []), ({"attempts": 7}, [("taken", 8)])])
def test_transition_checks_rows_changed_since_the_snapshot_again(parcels, eventually, change, moved):
    """The statement has read the row and waits for a lock. Meanwhile another session changes the row and commits."""
    gate = Func(
        Value(make_key("gate").number),
        template="pg_advisory_xact_lock(%(expressions)s) IS NOT NULL",
        output_field=BooleanField(),
    )
    rows = Parcel.objects.filter(weight=0).filter(gate)
    with ThreadPoolExecutor(1) as thread:
        with lock("gate"):
            answer = thread.submit(closing(lambda: rows.transition(from_=FREE, to=TAKEN, attempts=F("attempts") + 1)))
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


def test_rows_with_a_key_of_two_columns_are_moved(parcels):
    """The limit falls inside an aisle, and both aisles have the same numbers."""
    Rack.objects.bulk_create(Rack(aisle=aisle, number=n) for n in range(4) for aisle in "ab")
    rows = Rack.objects.order_by("-number", "aisle")
    assert [row.pk for row in rows.transition(from_="new", to="taken", limit=3)] == [("a", 3), ("b", 3), ("a", 2)]
    assert {row.pk for row in rows.filter(status="taken")} == {("a", 3), ("b", 3), ("a", 2)}
    with rows.filter(status="new").claim(1) as held:
        assert held[0].pk == ("b", 2)


class Replica:
    """Routes reads to a database that does not exist."""

    def db_for_read(self, model, **hints):
        return "replica"

    def db_for_write(self, model, **hints):
        return "default"


@pytest.mark.parametrize("verb", ["transition", "claim_update"])
def test_transition_writes_to_the_write_database_of_the_router(parcels, settings, verb):
    settings.DATABASE_ROUTERS = [f"{__name__}.Replica"]
    free = Parcel.objects.filter(status__in=FREE)
    moved = free.claim_update(2, status=TAKEN) if verb == "claim_update" else free.transition(from_=FREE, to=TAKEN)
    assert {row._state.db for row in moved} == {"default"}


@pytest.mark.django_db(transaction=True)
def test_at_repeatable_read_a_row_that_has_changed_since_the_snapshot_is_an_error(parcels, in_threads):
    """PostgreSQL can use neither the new version of the row nor the old one, and raises an error."""
    with pytest.raises(OperationalError, match="could not serialize access"), transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        assert Parcel.objects.count() == 10
        in_threads(lambda _: Parcel.objects.update(attempts=1), 1)
        Parcel.objects.transition(from_=FREE, to=TAKEN, limit=1)
    assert not Parcel.objects.filter(status=TAKEN).exists()
