"""Text tables for a terminal."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from django_pglock.management.tables import ago, duration_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-3, "-3 s"), (0.4, "0 s"), (119, "119 s"), (120, "2 minutes"), (36_427, "10 hours, 7 minutes")],
)
def test_long_times_are_not_in_seconds(seconds, text):
    assert duration_text(seconds) == text


def test_the_time_since_a_moment():
    now = datetime(2026, 11, 22, 12, tzinfo=timezone.utc)
    assert ago(now - timedelta(hours=3), now) == "3 hours"
    assert ago(None) == "-"
