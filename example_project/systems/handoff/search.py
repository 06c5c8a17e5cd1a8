"""The search table: all texts about an order, kept from 17 tables that any program may change."""

from django.db import models

from django_pglock import lock_all, task
from django_pglock.contrib.capture import Capture


@task(atomic=True, max_attempts=5)
def refresh(ids: list[int]) -> None:
    texts = {order: [] for order in ids}
    with lock_all(*(("search", order) for order in ids)):  # who writes an entry later has read later
        own = Order.objects.filter(id__in=ids).values_list("id", "text")
        parts = [part.objects.filter(order__in=ids).values_list("order", "text") for part in PARTS]
        for order, text in own.union(*parts, all=True):
            texts[order].append(text)
        Entry.objects.filter(order__in=ids).delete()
        Entry.objects.bulk_create(Entry(order=id_, text=" ".join(sorted(each))) for id_, each in texts.items() if each)


class Order(models.Model):
    text = models.CharField(max_length=200)

    class Meta:
        constraints = [Capture(refresh, name="handoff_order_capture")]


class Part(models.Model):
    order = models.ForeignKey(Order, models.CASCADE)
    text = models.CharField(max_length=200)

    class Meta:
        abstract = True
        constraints = [Capture(refresh, name="handoff_%(class)s_capture", ids="order", fields=["text"])]


KINDS = "Customer Address Phone Email Contact Item Option Serial Warranty Invoice Payment Parcel Claim Repair Call Note"
PARTS = [type(kind, (Part,), {"__module__": __name__}) for kind in KINDS.split()]


class Entry(models.Model):
    order = models.BigIntegerField(primary_key=True)
    text = models.TextField()
