"""Which leases are held, and their revocation."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import pytest
from django.db.models.functions import Now

from django_pglock.models import Lease as Row

pytestmark = pytest.mark.django_db(transaction=True)

HOUR = timedelta(hours=1)


def make(key, **dates):
    about = {"name": f"lease {key}", "owner": "o", "holder": uuid4(), "token": 1}
    return Row.objects.create(key=key, **about, **{"acquired_at": Now(), "renewed_at": Now(), **dates})


def test_a_revocation_concerns_the_leases_that_are_held():
    """A lease that was released within its min_hold has an expiry in the future, and no holder."""
    endless, renewed = make(1, expires_at=None), make(2, expires_at=Now() + HOUR)
    expired, released = make(3, expires_at=Now() - HOUR), make(4, expires_at=Now() + HOUR, released_at=Now())
    assert set(Row.objects.held()) == {endless, renewed}
    assert Row.objects.all().free() == 2
    assert not Row.objects.held().exists()
    assert Row.objects.all().free() == 0
    ends = dict(Row.objects.values_list("key", "expires_at"))
    assert ends[endless.key] == ends[renewed.key] < ends[released.key]
    assert ends[expired.key] < ends[endless.key]


def test_each_lease_has_its_state_by_the_time_of_the_server():
    """The same conditions as for ``held()``."""
    states = {
        (1, True, False): {"expires_at": None},
        (2, True, False): {"expires_at": Now() + HOUR},
        (3, False, False): {"expires_at": Now() - HOUR},
        (4, False, True): {"expires_at": Now() + HOUR, "released_at": Now()},
        (5, False, False): {"expires_at": Now() - HOUR, "released_at": Now()},
    }
    for (key, *_), dates in states.items():
        make(key, **dates)
    rows = list(Row.objects.all().with_state().order_by("key"))
    assert [(row.key, row.is_held, row.is_kept) for row in rows] == list(states)
    assert {row.pk for row in rows if row.is_held} == set(Row.objects.held().values_list("pk", flat=True))
    assert {row.server_time for row in rows} == {rows[0].server_time}
