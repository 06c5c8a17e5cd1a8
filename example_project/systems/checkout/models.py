"""Carts, and the payment of each."""

from uuid import uuid4

from django.conf import settings
from django.db import models, transaction

from django_pglock import lock
from example_project.systems import payments


class Cart(models.Model):
    """What a customer wants to buy. Its id is the idempotency key of its payment."""

    id = models.UUIDField(primary_key=True, default=uuid4)
    customer = models.ForeignKey(settings.AUTH_USER_MODEL, models.CASCADE)
    total = models.PositiveIntegerField()


class Payment(models.Model):
    """The payment of a cart, one at most. It is open until the provider's charge is written into it."""

    cart = models.OneToOneField(Cart, models.CASCADE)
    amount = models.PositiveIntegerField()
    charge = models.CharField(max_length=64, null=True, unique=True)
    invoice = models.PositiveIntegerField(null=True, unique=True)

    def settle(self):
        """Charge the customer, or find the charge whose answer was lost: for one key there is one charge."""
        if self.charge is None:
            self.finish(payments.charge(self.amount, key=self.cart_id))

    def finish(self, charge):
        """Write the charge and the next invoice number. The law allows no gaps, so numbers are given one by one."""
        with transaction.atomic(), lock("invoices"):  # held to the COMMIT, or to the ROLLBACK
            last = Payment.objects.aggregate(last=models.Max("invoice"))["last"] or 0
            Payment.objects.filter(pk=self.pk, charge=None).update(charge=charge, invoice=last + 1)
        self.refresh_from_db()
