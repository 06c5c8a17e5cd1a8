"""Tenants, as django-tenants wants them."""

from __future__ import annotations

from django.db import models
from django_tenants.models import DomainMixin, TenantMixin


class Customer(TenantMixin):
    name = models.CharField(max_length=100)

    class Meta:
        app_label = "customers"

    def __str__(self) -> str:
        return self.name


class Domain(DomainMixin):
    class Meta:
        app_label = "customers"
