"""The ledger: entries are added, and never changed or deleted."""

from django.db import models
from django.db.models.functions import Coalesce, Now


class EntryQuerySet(models.QuerySet):
    """The entries; the balance of a holder is the sum of the holder's entries."""

    def balance_of(self, holder):
        """Return the credits that a holder has."""
        return self.filter(holder=holder).aggregate(sum=Coalesce(models.Sum("amount"), 0))["sum"]

    def take(self, holder, amount, key):
        """Take credits, once for each key; return None if there are not enough. Hold lock("ledger", holder)."""
        entry = self.filter(holder=holder, key=key).first()
        if entry is None and self.balance_of(holder) >= amount:
            entry = self.create(holder=holder, amount=-amount, key=key)
        return entry


class Entry(models.Model):
    """Credits that a holder bought (positive) or used (negative)."""

    holder = models.CharField(max_length=64)
    amount = models.IntegerField()
    key = models.CharField(max_length=64)  # of the request that caused it
    charge = models.CharField(max_length=64, null=True, unique=True)  # of the payment provider, where money moved
    created_at = models.DateTimeField(db_default=Now())

    objects = EntryQuerySet.as_manager()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["holder", "key"], name="ledger_one_entry_for_each_key")]
