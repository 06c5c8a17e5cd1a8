"""The model of leases."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connection

from django_pglock import Lease
from django_pglock.models import Lease as LeaseRow

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize("style", ["postgres", "sql_standard", "iso_8601"])
def test_the_lifetime_is_read_whatever_the_style_of_intervals_is(style):
    lifetime = timedelta(days=1, hours=2, milliseconds=250)
    with Lease("nightly", ttl=lifetime), Lease("mutex", ttl=None), connection.cursor() as cursor:
        cursor.execute("SELECT set_config('IntervalStyle', %s, false)", [style])
        assert dict(LeaseRow.objects.values_list("name", "ttl")) == {"nightly": lifetime, "mutex": None}
        row = LeaseRow.objects.get(ttl=lifetime)
        assert row.ttl == lifetime
        row.save()
        row.refresh_from_db()
        assert row.ttl == lifetime
