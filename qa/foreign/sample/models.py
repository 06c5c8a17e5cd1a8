"""The data of a project: letters."""

from __future__ import annotations

from django.db import models


class Letter(models.Model):
    text = models.TextField()

    class Meta:
        app_label = "sample"

    def __str__(self) -> str:
        return self.text
