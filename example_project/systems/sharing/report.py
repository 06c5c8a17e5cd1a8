"""The job that one node at a time may do, however wrong the clocks of the nodes are."""

from __future__ import annotations

from django.db.models import Exists
from django.db.models.functions import Now
from django.utils import timezone

from django_pglock import Lease, LockNotAvailable
from example_project.systems.sharing.models import Report, Result

LOCK_AT_MOST_FOR = 3  # seconds after the last renewal; a node that lives renews by itself
LOCK_AT_LEAST_FOR = 1  # seconds


def write_report(node: str) -> bool:
    """Write a report if no other node is about to, or has just done so; return whether it was written."""
    try:
        with Lease("sharing:report", ttl=LOCK_AT_MOST_FOR, min_hold=LOCK_AT_LEAST_FOR, owner=node) as lease:
            Report.objects.create(token=lease.token, node=node, clock=timezone.now())
            results = Result.objects.count()
            later = Report.objects.filter(token__gt=lease.token)  # by the next holder, if this node stood still
            mine = Report.objects.filter(~Exists(later), token=lease.token)
            return bool(mine.update(results=results, ended_at=Now()))
    except LockNotAvailable:
        return False
