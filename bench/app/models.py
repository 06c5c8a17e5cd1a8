"""What atomic tasks write."""

from django.db import models


class Entry(models.Model):
    """One row."""

    text = models.CharField(max_length=64, default="paid")

    def __str__(self) -> str:
        return self.text
