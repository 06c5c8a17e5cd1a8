"""Data with a place on the map."""

from __future__ import annotations

from django.contrib.gis.db import models


class Shop(models.Model):
    name = models.CharField(max_length=100)
    place = models.PointField()

    class Meta:
        app_label = "places"

    def __str__(self) -> str:
        return self.name
