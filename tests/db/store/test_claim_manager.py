"""Claims on a table of somebody's own, and on tasks."""

from __future__ import annotations

import pytest
from django.db import connection, transaction
from django.db.models import F
from django.test.utils import CaptureQueriesContext

from tests.sample.models import Letter

pytestmark = pytest.mark.django_db


@pytest.fixture
def letters():
    return Letter.objects.bulk_create(Letter(text=f"letter {n}", urgency=n % 3) for n in range(10))


def test_marking_takes_the_limit_in_order_and_returns_the_rows_as_they_are_now(letters):
    new = Letter.objects.filter(status="new").order_by("-urgency", "id")
    expected = [letter.pk for letter in new[:4]]
    claimed = new.claim_update(4, status="taken", tries=F("tries") + 1)
    assert [letter.pk for letter in claimed] == expected
    assert {(letter.status, letter.tries) for letter in claimed} == {("taken", 1)}
    assert Letter.objects.filter(status="taken").count() == 4
    assert Letter.objects.filter(tries=1).count() == 4


def test_marking_is_one_statement(letters):
    with CaptureQueriesContext(connection) as queries:
        Letter.objects.filter(status="new").order_by("id").claim_update(3, status="taken")
    assert len(queries) == 1, queries.captured_queries


def test_a_set_that_cannot_match_is_an_empty_answer(letters):
    from django_pglock.models import Task

    assert Letter.objects.none().claim_update(3, status="taken") == []
    assert Letter.objects.filter(pk__in=[]).claim_update(3, status="taken") == []
    for verb in ("retry", "cancel", "run_now", "reset_stuck"):
        assert getattr(Task.objects.none(), verb)() == 0


@pytest.mark.parametrize("limit", [0, -1, True, 1.5, "3", None])
def test_a_limit_that_is_no_number_of_rows_is_refused(letters, limit):
    with pytest.raises(ValueError, match="number of rows"):
        Letter.objects.all().claim(limit)
    with pytest.raises(ValueError, match="number of rows"):
        Letter.objects.all().claim_update(limit, status="taken")


@pytest.mark.django_db(transaction=True)
def test_rows_are_held_to_the_end_of_the_block_and_let_go_when_it_raises(letters, in_threads):
    """Commitment control: what the block did to its rows and the rows themselves go together."""
    new = Letter.objects.filter(status="new").order_by("id")
    with pytest.raises(ZeroDivisionError), new.claim(4) as mine:
        Letter.objects.filter(pk__in=[letter.pk for letter in mine]).update(status="done")
        [others] = in_threads(lambda _: [letter.pk for letter in new.claim_update(10, status="taken")], 1)
        assert set(others).isdisjoint({letter.pk for letter in mine})
        assert len(others) == 6
        1 / 0  # noqa: B018
    assert Letter.objects.filter(status="new").count() == 4


@pytest.mark.django_db(transaction=True)
def test_outside_a_transaction_holding_is_refused_when_the_rows_are_looked_at(letters):
    claim = Letter.objects.all().claim(1)
    with pytest.raises(transaction.TransactionManagementError):
        list(claim)
    with transaction.atomic():
        assert len(Letter.objects.all().claim(2)) == 2
