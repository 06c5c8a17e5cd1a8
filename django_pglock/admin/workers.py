"""The admin page of workers: what each worker runs, and when its last heartbeat was."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import Count, F, FloatField, IntegerField, OuterRef, Subquery
from django.db.models.functions import Coalesce, Extract, Now
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from django_pglock.admin.pages import ReadOnlyAdmin, mark
from django_pglock.admin.task_page import as_moment
from django_pglock.models import Task, Worker
from django_pglock.store.liveness import is_alive


@admin.register(Worker)
class WorkerAdmin(ReadOnlyAdmin):
    """The list of workers and the page of one worker."""

    list_display: Any = [
        "name",
        "served_queues",
        "threads",
        "running",
        "heartbeat",
        "state",
        as_moment("started_at", Worker),
    ]
    ordering = ["started_at"]
    sortable_by = ["name"]
    fields = ("id", "name", "hostname", "pid", "served_queues", "threads", "lock_key", "running", "heartbeat", "state")

    def get_queryset(self, request: HttpRequest) -> Any:
        """Add the number of running tasks, the age of the heartbeat, and whether it is recent, in the same query."""
        owned = Task.objects.filter(worker=OuterRef("pk"), status="RUNNING").order_by().values("worker")
        running = Coalesce(Subquery(owned.annotate(count=Count("pk")).values("count"), output_field=IntegerField()), 0)
        # In seconds: psycopg reads intervals only if IntervalStyle is "postgres".
        heartbeat_age = Extract(Now() - F("heartbeat_at"), "epoch", output_field=FloatField())
        workers = super().get_queryset(request)
        return workers.annotate(running_tasks=running, heartbeat_age=heartbeat_age, is_alive=is_alive())

    @admin.display(description=_("queues"))
    def served_queues(self, worker: Worker) -> str:
        """Return the names of the queues."""
        return ", ".join(worker.queues) or str(_("all"))

    @admin.display(description=_("running tasks"))
    def running(self, worker: Any) -> int:
        """Return the number of tasks that the worker has claimed and not finished."""
        return int(worker.running_tasks)

    @admin.display(description=_("last heartbeat"))
    def heartbeat(self, worker: Any) -> str:
        """Return how long ago the last heartbeat was."""
        return str(_("%(seconds).1f s ago") % {"seconds": worker.heartbeat_age})

    @admin.display(description=_("state"))
    def state(self, worker: Any) -> str:
        """Return whether the worker is working, idle, stopping, or without heartbeat for too long."""
        if not worker.is_alive:
            return mark("failed", _("no heartbeat"))
        if worker.is_stopping:
            return mark("scheduled", _("stopping"))
        # A worker sleeps when it finds nothing to claim, also while it still runs tasks.
        word = _("idle") if worker.is_sleeping and not worker.running_tasks else _("working")
        return mark("successful", word)
