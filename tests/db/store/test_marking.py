"""The statement that locks the first free rows of a queryset and changes them."""

from __future__ import annotations

import pytest
from django.db import connection, transaction
from django.db.models import F
from django.test.utils import CaptureQueriesContext

from django_pglock.models import Task
from django_pglock.store.marking import first_free, mark
from tests.sample.models import Express, Letter, Parcel, Sender

pytestmark = pytest.mark.django_db


@pytest.fixture
def letters():
    return Letter.objects.bulk_create(Letter(text=f"letter {n}", urgency=n % 3) for n in range(10))


@pytest.fixture
def express():
    sender = Sender.objects.create(name="a")
    return [Express.objects.create(sender=sender, weight=weight) for weight in range(3)]


def test_marking_takes_the_limit_in_order_and_returns_the_rows_as_they_are_now(letters):
    new = Letter.objects.filter(status="new").order_by("-urgency", "id")
    expected = [letter.pk for letter in new[:4]]
    claimed = new.claim_update(4, status="taken", attempts=F("attempts") + 1)
    assert [letter.pk for letter in claimed] == expected
    assert {(letter.status, letter.attempts) for letter in claimed} == {("taken", 1)}
    assert Letter.objects.filter(status="taken").count() == 4
    assert Letter.objects.filter(attempts=1).count() == 4


def test_marking_is_one_statement(letters):
    with CaptureQueriesContext(connection) as queries:
        Letter.objects.filter(status="new").order_by("id").claim_update(3, status="taken")
    assert len(queries) == 1, queries.captured_queries


def test_a_set_that_cannot_match_is_an_empty_answer(letters):
    assert Letter.objects.none().claim_update(3, status="taken") == []
    assert Letter.objects.filter(pk__in=[]).claim_update(3, status="taken") == []
    for verb in ("retry", "cancel", "run_now", "reset_stuck"):
        assert getattr(Task.objects.none(), verb)() == 0


def test_marking_rows_of_two_tables_is_refused_with_what_to_do(express):
    """One UPDATE changes one table."""
    for change in (
        lambda: Express.objects.claim_update(2, courier="b"),
        lambda: Express.objects.transition(from_="new", to="taken"),
    ):
        with pytest.raises(ValueError, match=r"sample\.Express .* sample\.Parcel.*Parcel\.objects.*claim\(\)"):
            change()
    parcels = Parcel.objects.filter(express__in=express).order_by("pk")
    assert [each.pk for each in parcels.claim_update(2, status="taken")] == [each.pk for each in express[:2]]


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
