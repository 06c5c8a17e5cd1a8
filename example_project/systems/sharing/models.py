"""Rows to process, what becomes of them, and the reports that one node at a time writes."""

from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from django_pglock import ClaimManager


class Row(models.Model):
    """A row that arrived. It is set aside, with its last error, when it has failed as often as ``MOST_ATTEMPTS``."""

    data = models.TextField()
    processed = models.BooleanField(db_default=False)
    attempts = models.PositiveSmallIntegerField(db_default=0)
    error = models.TextField(db_default="")

    objects = ClaimManager()

    class Meta:
        # The order of claims, without the processed rows: a claim costs the same after a million of them.
        indexes = [models.Index(fields=["attempts", "id"], condition=Q(processed=False), name="sharing_row_waiting")]

    def __str__(self) -> str:
        return self.data[:40]


class Result(models.Model):
    """What was made of a row, and by which node."""

    row = models.ForeignKey(Row, models.CASCADE, related_name="results")
    node = models.CharField(max_length=40)
    text = models.CharField(max_length=100)
    made_at = models.DateTimeField(db_default=Now())

    def __str__(self) -> str:
        return self.text


class Report(models.Model):
    """One run of the job that one node at a time may do."""

    token = models.BigIntegerField(primary_key=True)
    node = models.CharField(max_length=40)
    clock = models.DateTimeField(help_text="What the clock of the node said. Nothing is decided by it.")
    began_at = models.DateTimeField(db_default=Now())
    ended_at = models.DateTimeField(null=True)
    results = models.PositiveIntegerField(null=True)

    def __str__(self) -> str:
        return f"report {self.token} of {self.node}"
