"""The page of workers: who is alive and who has not been heard of."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import Count, F, IntegerField, OuterRef, Subquery
from django.db.models.functions import Coalesce, Now
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.translation import gettext_lazy as _

from django_pglock.admin.pages import ReadOnlyAdmin
from django_pglock.conf import get_settings
from django_pglock.models import Task, Worker


class WorkerAdmin(ReadOnlyAdmin):
    """Workers, with what they run and how long ago they were heard."""

    list_display = ["name", "served_queues", "threads", "running", "heard", "state", "started_at"]
    ordering = ["started_at"]
    sortable_by = ["name"]
    fields = ("id", "name", "hostname", "pid", "served_queues", "threads", "lock_key", "running", "heard", "state")
    readonly_fields = fields

    def get_queryset(self, request: HttpRequest) -> Any:
        """Count what each worker runs, in the same query."""
        owned = Task.objects.filter(worker=OuterRef("pk"), status="RUNNING").order_by().values("worker")
        running = Coalesce(Subquery(owned.annotate(count=Count("pk")).values("count"), output_field=IntegerField()), 0)
        heard_ago = Now() - F("heartbeat_at")
        return super().get_queryset(request).annotate(running_tasks=running, heard_ago=heard_ago)

    @admin.display(description=_("queues"))
    def served_queues(self, worker: Worker) -> str:
        """Return the names of the queues."""
        return ", ".join(worker.queues) or str(_("all"))

    @admin.display(description=_("running"))
    def running(self, worker: Any) -> int:
        """Return how many tasks it has claimed."""
        return int(worker.running_tasks)

    @admin.display(description=_("heard"))
    def heard(self, worker: Any) -> str:
        """Return how long ago its heart beat."""
        return str(_("%(seconds).1f s ago") % {"seconds": worker.heard_ago.total_seconds()})

    @admin.display(description=_("state"))
    def state(self, worker: Any) -> str:
        """Return what it does, or that nobody knows."""
        if worker.heard_ago.total_seconds() > get_settings().HEARTBEAT_LIMIT:
            return format_html('<span class="pglock-status pglock-failed">{}</span>', _("silent"))
        if worker.is_stopping:
            return format_html('<span class="pglock-status pglock-scheduled">{}</span>', _("stopping"))
        word = _("waits for work") if worker.is_sleeping else _("works")
        return format_html('<span class="pglock-status pglock-successful">{}</span>', word)
