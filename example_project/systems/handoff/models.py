"""The sheets, and the hand-off plane: the table between the front end and the back ends."""

from django.db import models

from django_pglock import ClaimManager
from example_project.systems.handoff import search  # noqa: F401 - its 17 tables


class Sheet(models.Model):
    name = models.CharField(max_length=50, primary_key=True)
    lines = models.JSONField(default=list)

    def append(self, lines: list[str]) -> None:
        self.lines += lines
        self.save()


class Request(models.Model):
    kind = models.CharField(max_length=6)  # create or update
    sheet = models.CharField(max_length=50)
    line = models.CharField(max_length=200)
    status = models.CharField(max_length=8, default="new")  # then complete or error
    run = models.BigIntegerField(null=True)  # the first of the requests that were handled together
    objects = ClaimManager()

    class Meta:
        constraints = [models.UniqueConstraint("sheet", condition=models.Q(kind="create"), name="handoff_one_create")]
        indexes = [
            models.Index("id", condition=models.Q(status="new"), name="handoff_new"),
            models.Index("sheet", "id", condition=models.Q(status="new"), name="handoff_new_of_sheet"),
        ]
