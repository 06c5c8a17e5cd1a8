"""The model of leases."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connection
from django.db.models import F, Max, Subquery

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
        assert LeaseRow.objects.aggregate(longest=Max("ttl")) == {"longest": lifetime}
        row.save()
        row.refresh_from_db()
        assert row.ttl == lifetime


def test_the_lifetime_is_read_also_where_django_selects_the_bare_column():
    with Lease("nightly", ttl=5):
        [row] = LeaseRow.objects.raw(f"SELECT * FROM {LeaseRow._meta.db_table}")
        assert row.ttl == timedelta(seconds=5)
        row.ttl = F("ttl") + timedelta(seconds=1)
        row.save()
        row.refresh_from_db()
        assert row.ttl == timedelta(seconds=6)


def test_the_lifetime_in_a_subquery_is_an_interval():
    with Lease("nightly", ttl=5):
        lifetimes = LeaseRow.objects.values("ttl")
        assert LeaseRow.objects.get(ttl__in=lifetimes).name == "nightly"
        assert LeaseRow.objects.annotate(same=Subquery(lifetimes)).get().same == timedelta(seconds=5)
        assert LeaseRow.objects.distinct().aggregate(longest=Max("ttl")) == {"longest": timedelta(seconds=5)}
