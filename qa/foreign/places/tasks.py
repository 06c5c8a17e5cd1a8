"""Task functions that work with places."""

from __future__ import annotations

from django.contrib.gis.geos import Point

from django_pglock import task
from qa.foreign.places.models import Shop


@task
def open_shop(name: str, longitude: float, latitude: float) -> None:
    Shop.objects.create(name=name, place=Point(longitude, latitude, srid=4326))


@task(atomic=True)
def count_near(longitude: float, latitude: float) -> int:
    here = Point(longitude, latitude, srid=4326)
    return Shop.objects.filter(place__dwithin=(here, 1)).count()
