"""Data whose history django-pghistory keeps."""

from __future__ import annotations

import pghistory
from django.db import models


@pghistory.track()
class Account(models.Model):
    balance = models.IntegerField(default=0)

    class Meta:
        app_label = "tracked"

    def __str__(self) -> str:
        return f"account {self.pk}"
