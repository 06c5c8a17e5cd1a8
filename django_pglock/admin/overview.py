"""The overview: problems, queues, workers, and charts."""

from __future__ import annotations

from datetime import timedelta
from itertools import groupby
from operator import attrgetter
from typing import Any

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.db import models
from django.http import HttpRequest, HttpResponse
from django.urls import URLPattern
from django.utils import timezone
from django.utils.text import capfirst
from django.utils.translation import gettext_lazy as _

from django_pglock.admin.charts import charts_of, choice_of
from django_pglock.admin.overview_attention import Facts, attention
from django_pglock.admin.pages import AtLeast, PageOnly, ReadOnlyAdmin, elapsed
from django_pglock.models import AdvisoryLock, Lease, Queue, Schedule, Task, Worker
from django_pglock.store.numbers import finished_per_minute
from django_pglock.tasks.compat import task_backends

#: A user who may view one of these models may view the overview. Each section shows only data that the user may view.
VIEWED = (Task, Worker, Queue, Schedule, AdvisoryLock, Lease)
#: Rows of a table, and tasks of one worker, that are shown.
MOST_SHOWN, FEW = 20, 3


def queue_table(facts: Facts) -> dict[str, Any]:
    """Return the queues, the urgent ones first: with the oldest ready tasks, paused, with running tasks, configured."""
    configured = [queue for backend in task_backends.all() for queue in sorted(backend.queues)]
    running = [queue for queue, each in facts.depths.items() if each.counts["RUNNING"]]
    names = list(dict.fromkeys([*facts.ages, *facts.paused, *running, *configured]))
    rates = finished_per_minute(facts.using, names[:MOST_SHOWN])
    rows = [_queue_row(facts, name, rates.get(name, 0)) for name in names[:MOST_SHOWN]]
    return {"rows": rows, "more": len(names) - len(rows)}


def _queue_row(facts: Facts, name: str, rate: float) -> dict[str, Any]:
    age, depth, now = facts.ages.get(name), facts.depths.get(name), timezone.now()
    row: dict[str, Any] = {"name": name, "is_paused": name in facts.paused}
    row["oldest"] = "-" if age is None else elapsed(now - timedelta(seconds=age), now)
    row["rate"] = f"{rate:,.{0 if rate >= 10 else 1}f}"
    for status in ("READY", "RUNNING", "FAILED"):
        count = depth.counts[status] if depth else 0
        row[status.lower()] = AtLeast(count) if depth and status in depth.at_least else count
        row[f"{status.lower()}_url"] = facts.address("task_changelist", status__exact=status, queue=name)
    return row


def worker_table(facts: Facts) -> dict[str, Any]:
    """Return the workers, those with running tasks first: each with its oldest tasks, and how many more it runs."""
    running = facts.running if facts.may_view(Task) else []
    tasks = {worker: list(group) for worker, group in groupby(running, key=attrgetter("worker"))}
    workers = sorted(facts.workers, key=lambda worker: (worker.pk not in tasks, worker.name))
    rows = []
    for worker in workers[:MOST_SHOWN]:
        oldest = sorted(tasks.get(worker.pk, []), key=attrgetter("last_attempted_at"))
        shown = [(task, elapsed(task.last_attempted_at)) for task in oldest[:FEW]]
        rows.append((worker, shown, len(oldest) - FEW))
    return {"rows": rows, "more": len(workers) - len(rows)}


class Overview(models.Model):
    """The name under which admin sites list the overview."""

    class Meta(PageOnly):
        verbose_name = _("overview")
        verbose_name_plural = _("overview")

    def __str__(self) -> str:
        return str(self._meta.verbose_name)


@admin.register(Overview)
class OverviewAdmin(ReadOnlyAdmin):
    """The page. While it is visible, its script loads it every five seconds, and takes the part that changes."""

    class Media:
        """Without the script, a link loads the page again."""

        js = ("django_pglock/overview.js",)

    def get_urls(self) -> list[URLPattern]:
        """Return the page, under the name of a list so that the admin links to it."""
        return [self.own_path("", "changelist", self.page_view)]

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return whether the user may view any of the pages of this package."""
        facts = Facts(request, self.admin_site)
        return any(facts.may_view(model) for model in VIEWED)

    def has_module_permission(self, request: HttpRequest) -> bool:
        """Return whether the index lists the page."""
        return self.has_view_permission(request)

    def page_view(self, request: HttpRequest) -> HttpResponse:
        """Show the sections that the user may view."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        facts = Facts(request, self.admin_site)
        context: dict[str, Any] = {"title": capfirst(self.opts.verbose_name), "sentences": list(attention(facts))}
        if facts.may_view(Task):
            queues = queue_table(facts)
            choice = choice_of(request, {*(each["name"] for each in queues["rows"]), *facts.ages, *facts.paused})
            context |= {"queues": queues, "choice": choice, "charts": charts_of(facts.using, choice)}
        if facts.may_view(Worker):
            context["workers"] = worker_table(facts)
        return self.answer(request, "overview", context)
