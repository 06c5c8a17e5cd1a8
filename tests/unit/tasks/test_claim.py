"""Claims: their dates, and their text in the log."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from django_pglock.tasks.claim import Claim, date_of


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
    values = dict.fromkeys(("priority", "retries", "rescues", "run_after", "enqueued_at"), 0)
    values |= dict.fromkeys(("started_at", "last_attempted_at"), 0) | {"max_retries": 2, "id": 7, "worker": uuid4()}
    values |= {"backend": "default", "queue": "default", "task_path": "shop.send", "args": "", "kwargs": "", "meta": ""}
    claim = Claim(**{**values, **counts})
    assert str(claim) == f"Task 7 (shop.send) {text}"
    assert claim.is_first is text.startswith("attempt 1 of")
