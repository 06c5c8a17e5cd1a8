"""The models of the shop: products, orders, receipts, and a ledger of credits that never goes below zero."""

from __future__ import annotations

from django.conf import settings
from django.db import models
from django.db.models import Sum
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _


class Product(models.Model):
    """Something to buy, for credits."""

    name = models.CharField(_("name"), max_length=64)
    price = models.PositiveIntegerField(_("price"), help_text=_("In credits."))

    class Meta:
        verbose_name = _("product")
        verbose_name_plural = _("products")

    def __str__(self) -> str:
        return self.name


class CreditQuerySet(models.QuerySet):
    """The entries of the ledger; the balance of a user is the sum of the user's entries."""

    def balance_of(self, user_id: int) -> int:
        """Return the balance of a user. To spend credits, hold ``lock("ledger", user_id)`` until the new entry."""
        return self.filter(user_id=user_id).aggregate(sum=Sum("amount"))["sum"] or 0


class CreditEntry(models.Model):
    """Credits that a user got (positive) or spent (negative)."""

    user = models.ForeignKey(settings.AUTH_USER_MODEL, models.CASCADE, verbose_name=_("user"))
    amount = models.IntegerField(_("amount"))
    reason = models.CharField(_("reason"), max_length=64)
    created_at = models.DateTimeField(_("created at"), db_default=Now())

    objects = CreditQuerySet.as_manager()

    class Meta:
        verbose_name = _("credit entry")
        verbose_name_plural = _("credit entries")

    def __str__(self) -> str:
        return f"{self.amount:+} {self.reason}"


class Order(models.Model):
    """A cart that was paid. The lock answers the second click politely; the constraint would stop it in any case."""

    user = models.ForeignKey(settings.AUTH_USER_MODEL, models.CASCADE, verbose_name=_("user"))
    product = models.ForeignKey(Product, models.PROTECT, verbose_name=_("product"))
    cart = models.UUIDField(_("cart"), unique=True)
    charge = models.OneToOneField(CreditEntry, models.PROTECT, verbose_name=_("charge"))
    created_at = models.DateTimeField(_("created at"), db_default=Now())

    class Meta:
        verbose_name = _("order")
        verbose_name_plural = _("orders")

    def __str__(self) -> str:
        return f"{self.product} ({self.cart})"


class Receipt(models.Model):
    """The receipt of an order. One for each order, even if its task runs several times."""

    order = models.OneToOneField(Order, models.CASCADE, verbose_name=_("order"))
    sent_at = models.DateTimeField(_("sent at"), db_default=Now())

    class Meta:
        verbose_name = _("receipt")
        verbose_name_plural = _("receipts")

    def __str__(self) -> str:
        return str(self.order)


class Effect(models.Model):
    """What a task of the demo has done: written by the task, counted by the demo."""

    kind = models.CharField(_("kind"), max_length=16)
    number = models.IntegerField(_("number"))
    pid = models.IntegerField(_("process id"))
    created_at = models.DateTimeField(_("created at"), db_default=Now())

    class Meta:
        verbose_name = _("effect")
        verbose_name_plural = _("effects")
        indexes = [models.Index(fields=["kind", "number"], name="shop_effect_kind_number")]

    def __str__(self) -> str:
        return f"{self.kind} {self.number}"
