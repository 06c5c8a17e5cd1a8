"""The dates that Python has in each time zone."""

from __future__ import annotations

from datetime import datetime, timedelta
from datetime import timezone as fixed

import pytest

from django_pglock.tasks.dates import READABLE, is_readable


@pytest.mark.parametrize("hours", [-12, 0, 14])
def test_an_aware_date_is_compared_as_a_moment(hours):
    zone = fixed(timedelta(hours=hours))
    step = timedelta(microseconds=1)
    first, last = (date.astimezone(zone) for date in READABLE)
    assert [is_readable(date) for date in (first - step, first, last, last + step)] == [False, True, True, False]
    assert not is_readable(datetime.min.replace(tzinfo=zone))
    assert not is_readable(datetime.max.replace(tzinfo=zone))


@pytest.mark.parametrize(("zone", "hour"), [("UTC", 0), ("Pacific/Kiritimati", 14), ("Etc/GMT+12", -12)])
def test_a_naive_date_is_in_the_time_zone_of_the_settings(settings, zone, hour):
    settings.TIME_ZONE = zone
    last = datetime(9999, 12, 30) + timedelta(hours=hour)
    assert [is_readable(date) for date in (last, last + timedelta(microseconds=1))] == [True, False]
    assert not is_readable(datetime.min)
    assert not is_readable(datetime.max)
