"""Claims on a table of the user, and on tasks."""

from __future__ import annotations

import logging

import pytest
from django.db import DataError, OperationalError, connection, transaction
from django.db.models import BooleanField
from django.db.models.expressions import RawSQL
from django.test.utils import CaptureQueriesContext

from tests.db.store.test_marking import Replica
from tests.sample.models import Express, Letter, Sender

pytestmark = pytest.mark.django_db


@pytest.mark.django_db(transaction=True)
def test_claimed_rows_are_locked_until_the_block_ends_or_raises(letters, in_threads):
    """Commitment control: the changes of the block and the locks on its rows end together."""
    new = Letter.objects.filter(status="new").order_by("id")
    with pytest.raises(ZeroDivisionError), new.claim(4) as mine:
        Letter.objects.filter(pk__in=[letter.pk for letter in mine]).update(status="done")
        [others] = in_threads(lambda _: [letter.pk for letter in new.claim_update(10, status="taken")], 1)
        assert set(others).isdisjoint({letter.pk for letter in mine})
        assert len(others) == 6
        1 / 0  # noqa: B018
    assert Letter.objects.filter(status="new").count() == 4


@pytest.mark.django_db(transaction=True)
def test_a_query_that_fails_ends_the_transaction_of_the_block(letters):
    failing = Letter.objects.filter(RawSQL("id / 0 = 1", (), BooleanField()))
    with pytest.raises(DataError, match="division by zero"), failing.claim(1):
        pass
    assert not connection.in_atomic_block
    assert Letter.objects.count() == len(letters)


@pytest.mark.django_db(transaction=True)
def test_claim_outside_a_transaction_is_refused_when_its_rows_are_read(letters):
    claim = Letter.objects.all().claim(1)
    with pytest.raises(transaction.TransactionManagementError):
        list(claim)
    with transaction.atomic():
        assert len(list(Letter.objects.all().claim(2))) == 2


@pytest.fixture
def express():
    sender = Sender.objects.create(name="a")
    return [Express.objects.create(sender=sender, weight=weight) for weight in range(3)]


@pytest.mark.django_db(transaction=True)
def test_rows_of_two_tables_can_be_held(express, in_threads):
    rows = Express.objects.filter(status="new").order_by("pk")

    def claim(number):
        with rows.claim(3) as others:
            return [each.pk for each in others]

    with rows.claim(2) as held:
        assert [each.pk for each in held] == [each.pk for each in express[:2]]
        assert in_threads(claim, 1) == [[express[2].pk]]
        assert in_threads(lambda _: rows.claim_each(3, done), 1) == [1]


def done(letter):
    Letter.objects.filter(pk=letter.pk).update(status="done")


@pytest.mark.django_db(transaction=True)
def test_each_row_is_handled_once_in_the_order_of_the_keys_up_to_the_limit(letters):
    """This holds whether or not the function removes the row from the queryset."""
    seen = []
    new = Letter.objects.filter(status="new").order_by("-urgency")
    assert new.claim_each(4, seen.append) == 4
    assert new.claim_each(100, seen.append) == 10
    assert [letter.pk for letter in seen] == [letter.pk for letter in letters[:4] + letters]
    assert Letter.objects.none().claim_each(1, seen.append) == 0


@pytest.mark.django_db(transaction=True)
def test_each_row_has_a_transaction_of_its_own_and_a_failure_undoes_the_last(letters):
    def fail_at_third(letter):
        done(letter)
        if letter.pk == letters[2].pk:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Letter.objects.filter(status="new").claim_each(10, fail_at_third)
    assert Letter.objects.filter(status="done").count() == 2


@pytest.mark.django_db(transaction=True)
def test_a_claimed_row_is_skipped_until_the_next_pass(letters, in_threads):
    new = Letter.objects.filter(status="new").order_by("pk")
    with new.claim(1):
        assert in_threads(lambda _: new.claim_each(100, done), 1) == [9]
    assert new.claim_each(100, done) == 1


@pytest.mark.django_db(transaction=True)
def test_each_search_begins_behind_the_row_before(letters):
    """So a pass reads locked rows, and dead rows that a long transaction keeps, only once."""
    with CaptureQueriesContext(connection) as queries:
        Letter.objects.filter(status="new").claim_each(2, done)
    searches = [query["sql"] for query in queries if "SKIP LOCKED" in query["sql"]]
    assert len(searches) == 2
    assert f'"id" > {letters[0].pk}' in searches[1]
    assert all("LIMIT 1 FOR UPDATE" in search for search in searches), "later rows are free for others"
    assert not [query["sql"] for query in queries if "SAVEPOINT" in query["sql"]]


@pytest.mark.django_db(transaction=True)
def test_a_row_whose_function_fails_is_marked_and_stops_no_other(letters, caplog):
    def fail_at_third(letter):
        done(letter)
        if letter.pk == letters[2].pk:
            Letter.objects.create(text="is undone")
            raise ZeroDivisionError

    new = Letter.objects.filter(status="new")
    with caplog.at_level(logging.ERROR):
        assert new.claim_each(100, fail_at_third, failed={"status": "failed"}) == 10
    assert [letter.pk for letter in Letter.objects.filter(status="failed")] == [letters[2].pk]
    assert Letter.objects.filter(status="done").count() == 9
    assert not new.exists()
    assert f"sample.Letter {letters[2].pk} has failed." in caplog.text
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.django_db(transaction=True)
def test_a_lost_session_does_not_mark_a_row_as_failed(letters):
    def lose(letter):
        raise OperationalError("deadlock detected")

    with pytest.raises(OperationalError):
        Letter.objects.filter(status="new").claim_each(100, lose, failed={"status": "failed"})
    assert Letter.objects.filter(status="new").count() == 10


@pytest.mark.django_db(transaction=True)
def test_a_pass_works_in_the_database_for_writing(letters, settings):
    """A router may send reads to a replica."""
    settings.DATABASE_ROUTERS = [Replica()]

    def fail(letter):
        raise ZeroDivisionError

    assert Letter.objects.filter(status="new").claim_each(3, fail, failed={"status": "failed"}) == 3
    settings.DATABASE_ROUTERS = []
    assert Letter.objects.filter(status="failed").count() == 3


def test_a_function_may_delete_its_row_or_copy_it(letters):
    waiting = Letter.objects.filter(status="new")
    count = waiting.count()
    assert waiting.claim_each(100, lambda row: row.delete()) == count
    assert not waiting.exists()

    Letter.objects.bulk_create(Letter(status="new") for _ in range(3))
    seen = []

    def copy_and_fail(row):
        seen.append(row.pk)
        row.pk = None
        row.status = "copy"
        row.save()
        raise LookupError

    assert waiting.claim_each(100, copy_and_fail, failed={"status": "failed"}) == 3
    assert sorted(Letter.objects.filter(status="failed").values_list("pk", flat=True)) == sorted(seen)


def test_a_model_with_a_parent_may_have_changes_in_both_tables(express):
    def fail(row):
        raise ZeroDivisionError

    assert Express.objects.all().claim_each(5, fail, failed={"status": "failed", "weight": 9}) == 3
    assert set(Express.objects.values_list("status", "weight")) == {("failed", 9)}
