"""Claims: their dates, and their text in the log."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_pglock.tasks.claim import LOG_FIELDS, Claim, date_of

WORKER = uuid4()


def claim_of(**values):
    known = dict.fromkeys(("priority", "retries", "rescues", "run_after", "enqueued_at"), 0)
    known |= dict.fromkeys(("started_at", "last_attempted_at"), 0) | {"max_retries": 2, "id": 7, "worker": WORKER}
    known |= {"backend": "default", "queue": "mail", "task_path": "shop.send", "args": "", "kwargs": "", "meta": ""}
    return Claim(**{**known, **values})


@given(microseconds=st.integers(0, 8 * 10**15))
def test_no_microsecond_is_lost_in_seconds(microseconds):
    date = datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(microseconds=microseconds)
    assert date_of(float(f"{microseconds // 10**6}.{microseconds % 10**6:06}")) == date


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ({"attempt": 1}, "attempt 1 of 3"),
        ({"attempt": 3, "retries": 2}, "attempt 3 of 3"),
        ({"attempt": 2, "retries": 0, "rescues": 1}, "attempt 2 of 4"),
        ({"attempt": 4, "retries": 2, "rescues": 1}, "attempt 4 of 4"),
        ({"attempt": 9, "retries": 0, "uncounted": 8}, "attempt 1 of 3"),
    ],
    ids=["the first", "the last", "after a rescue", "the last after a rescue", "after snoozes"],
)
def test_the_log_says_which_attempt_it_is_of_how_many(counts, text):
    claim = claim_of(**counts)
    assert str(claim) == f"Task 7 (shop.send) {text}"
    assert claim.is_first is text.startswith("attempt 1 of")
    assert repr(claim) == f"<Claim of task 7 (shop.send) {text.partition(' of')[0]}>"


def test_a_claim_equals_only_itself_and_has_no_other_attributes():
    claim, same = claim_of(attempt=1), claim_of(attempt=1)
    assert len({claim, same}) == 2
    assert claim.is_cancelled is False
    with pytest.raises(AttributeError):
        claim.is_canceled = True


def test_the_fields_of_log_records_are_those_of_the_task():
    fields = claim_of(attempt=9, uncounted=8).log_fields()
    assert tuple(fields) == LOG_FIELDS
    assert list(fields.values()) == [7, "shop.send", "mail", 1, str(WORKER)]


@pytest.mark.parametrize(
    ("run_after", "last_attempted_at", "due_at", "waited"),
    [(None, "15.5", 10, 5.5), ("12", "15.5", 12, 3.5), ("8", "15.5", 10, 5.5), ("20", "15.5", 20, 0)],
)
def test_a_task_is_due_when_it_is_enqueued_and_its_date_is_over(run_after, last_attempted_at, due_at, waited):
    """If the clock is set back in between, the wait is zero and not negative."""
    claim = claim_of(attempt=1, enqueued_at="10", run_after=run_after, last_attempted_at=last_attempted_at)
    assert (claim.due_at, claim.waited) == (due_at, waited)


def test_the_dates_are_values_and_a_first_attempt_starts_now(settings):
    claim = claim_of(attempt=1, run_after=None, started_at=None, last_attempted_at="15.5", enqueued_at="10")
    started = datetime(1970, 1, 1, 0, 0, 15, 500_000, tzinfo=timezone.utc)
    assert (claim.date("started_at"), claim.date("last_attempted_at")) == (started, started)
    assert claim.date("run_after") is None
    assert claim_of(attempt=2, started_at="9", last_attempted_at="15").date("started_at").second == 9
    settings.USE_TZ, settings.TIME_ZONE = False, "UTC"
    assert claim.date("started_at") == started.replace(tzinfo=None)
