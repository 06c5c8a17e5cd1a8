"""Dates of claims."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from hypothesis import given
from hypothesis import strategies as st

from django_pglock.tasks.claim import date_of


@given(microseconds=st.integers(0, 8 * 10**15))
def test_no_microsecond_is_lost_in_seconds(microseconds):
    date = datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(microseconds=microseconds)
    assert date_of(float(f"{microseconds // 10**6}.{microseconds % 10**6:06}")) == date
