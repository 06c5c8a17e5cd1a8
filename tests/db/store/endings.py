"""Helpers for tests of ``after=``: they end tasks and return the statuses."""

from __future__ import annotations

from django_pglock.models import Task
from django_pglock.store.outcome import Failure
from django_pglock.store.release import release
from django_pglock.store.settle import settle

FAILURE = Failure("builtins.ValueError", "Traceback …")


def statuses():
    return list(Task.objects.order_by("id").values_list("status", flat=True))


def settle_one(claim, outcome):
    settle("default", [(claim, outcome)], claim.worker)
    release("default", [claim.id])
