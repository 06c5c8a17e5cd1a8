"""GeoDjango's PostGIS backend: it registers adapters of geometries on each new psycopg connection.

Its class changes nothing else of how statements travel. A session that did not come through its
``get_new_connection()`` could not write a geometry.
"""

from __future__ import annotations

import asyncio

from django.contrib.gis.geos import Point
from django.db import connection, transaction

from django_pglock import Lease, enqueue_many, lock
from django_pglock.models import AdvisoryLock, Task
from qa.foreign.places.models import Shop
from qa.foreign.places.tasks import count_near, open_shop


def test_postgis_is_installed_as_an_extension():
    with connection.cursor() as cursor:
        cursor.execute("SELECT extname FROM pg_extension WHERE extname = 'postgis'")
        assert cursor.fetchone() == ("postgis",)
    assert connection.settings_dict["ENGINE"].endswith("postgis")


def test_geometries_are_written_under_locks():
    with lock("shops"):
        assert AdvisoryLock.objects.for_name("shops").held().exists()
        Shop.objects.create(name="first", place=Point(13.4, 52.5, srid=4326))
    with transaction.atomic(), lock("shops"):
        Shop.objects.create(name="second", place=Point(13.5, 52.5, srid=4326))
        open_shop.enqueue("third", 13.6, 52.5)
    assert Shop.objects.get(name="first").place.coords == (13.4, 52.5)
    assert Shop.objects.filter(place__dwithin=(Point(13.4, 52.5, srid=4326), 0.05)).count() == 1
    assert Task.objects.count() == 1


def test_a_worker_writes_and_reads_geometries(drain):
    Shop.objects.all().delete()
    enqueue_many(open_shop, [(f"shop {number}", 13.0, 52.0 + number) for number in range(5)])
    drain()
    result = count_near.enqueue(13.0, 53.0)
    drain()
    result.refresh()
    assert result.return_value == 3
    assert [*Shop.objects.order_by("name").values_list("place", flat=True)][4].coords == (13.0, 56.0)


def test_locks_of_coroutines_and_leases_work_on_postgis():
    async def take() -> None:
        async with lock("asynchronous"):
            pass

    asyncio.run(take())
    with Lease("nightly", ttl=60) as lease:
        lease.extend(60)
