"""Tables of a project that uses the package."""

from django.db import models
from django.db.models.functions import Now

from django_pglock import ClaimManager


class Effect(models.Model):
    """What a task has done, written by the task: the tests count these."""

    name = models.CharField(max_length=64)
    number = models.IntegerField(default=0)
    pid = models.IntegerField(default=0)

    class Meta:
        indexes = [models.Index(fields=["name"], name="sample_effect_name")]

    def __str__(self) -> str:
        return f"{self.name} {self.number}"


class Letter(models.Model):
    """A table of the user with rows to be processed, independent of tasks."""

    text = models.CharField(max_length=64)
    urgency = models.IntegerField(default=0)
    status = models.CharField(max_length=16, default="new")
    attempts = models.IntegerField(default=0)

    objects = ClaimManager()

    def __str__(self) -> str:
        return self.text


class Run(models.Model):
    """One run of a function under chaos: a row at its start, the end in it when it ends, both by the server's clock."""

    task = models.BigIntegerField()
    attempt = models.IntegerField()
    worker = models.UUIDField()
    thread = models.CharField(max_length=64, default="")
    key = models.CharField(max_length=64, default="")
    is_atomic = models.BooleanField(default=False)
    started_at = models.DateTimeField(db_default=Now())
    ended_at = models.DateTimeField(null=True)

    def __str__(self) -> str:
        return f"attempt {self.attempt} of task {self.task}"


class Sender(models.Model):
    """The owner of parcels."""

    name = models.CharField(max_length=64)

    def __str__(self) -> str:
        return self.name


class Parcel(models.Model):
    """A table of the user with a status of a few values, and a foreign key to another table."""

    class Status(models.TextChoices):
        NEW = "new"
        RETURNED = "returned"
        TAKEN = "taken"
        LOST = "lost"

    sender = models.ForeignKey(Sender, models.CASCADE)
    weight = models.IntegerField()
    status = models.CharField(max_length=16, choices=Status.choices, default=Status.NEW)
    attempts = models.IntegerField(default=0)
    taken_at = models.DateTimeField(null=True)

    objects = ClaimManager()

    class Meta:
        indexes = [
            models.Index(
                fields=["weight"], name="sample_parcel_free", condition=models.Q(status__in=["new", "returned"])
            )
        ]

    def __str__(self) -> str:
        return f"{self.weight} {self.status}"


class Express(Parcel):
    """A parcel with a table of its own for what only it has."""

    courier = models.CharField(max_length=16, default="")


class Shelf(models.Model):
    """Where products are."""

    name = models.CharField(max_length=64)

    def __str__(self) -> str:
        return self.name


class Product(models.Model):
    """A table whose changes are captured. Two of its columns have types without an operator ``=``."""

    name = models.CharField(max_length=64)
    price = models.IntegerField(default=0)
    shelf = models.ForeignKey(Shelf, models.CASCADE, null=True, db_column="select")
    wanted = models.JSONField(null=True)

    def __str__(self) -> str:
        return self.name


class Rack(models.Model):
    """A table whose rows have a key of two columns, in another order than the columns."""

    pk = models.CompositePrimaryKey("aisle", "number")
    status = models.CharField(max_length=16, default="new")
    number = models.IntegerField()
    aisle = models.CharField(max_length=16)

    objects = ClaimManager()

    def __str__(self) -> str:
        return f"{self.aisle} {self.number}"
