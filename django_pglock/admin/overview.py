"""The overview: problems, queues, workers, and charts. The part that changes is also served as a fragment."""

from __future__ import annotations

from datetime import timedelta
from itertools import groupby
from operator import attrgetter
from typing import Any

from django.core.exceptions import PermissionDenied
from django.db import models
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import URLPattern
from django.utils import timezone
from django.utils.text import capfirst
from django.utils.translation import gettext
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
    """Return the workers, those with running tasks first. With their tasks, if the user may view tasks."""
    running = facts.running if facts.may_view(Task) else []
    tasks = {worker: list(group) for worker, group in groupby(running, key=lambda task: task.worker)}
    workers = sorted(facts.workers, key=lambda worker: (worker.pk not in tasks, worker.name))
    rows = [_worker_row(facts, worker, tasks.get(worker.pk, [])) for worker in workers[:MOST_SHOWN]]
    return {"rows": rows, "more": len(workers) - len(rows)}


def _worker_row(facts: Facts, worker: Worker, running: list[Task]) -> dict[str, Any]:
    """Return one living worker: which queues it serves, its first running tasks, and how many more run."""
    oldest = sorted(running, key=attrgetter("last_attempted_at"))
    return {
        "name": worker.name,
        "url": facts.address("worker_change", worker.pk),
        "queues": ", ".join(worker.queues) or gettext("all"),
        "since": elapsed(worker.started_at),
        "is_stopping": worker.is_stopping,
        "tasks": [(f"{task.name} #{task.pk}", elapsed(task.last_attempted_at), task.pk) for task in oldest[:FEW]],
        "more": len(oldest) - FEW,
    }


class Overview(models.Model):
    """The name under which admin sites list the overview."""

    class Meta(PageOnly):
        verbose_name = _("overview")
        verbose_name_plural = _("overview")

    def __str__(self) -> str:
        return str(self._meta.verbose_name)


class OverviewAdmin(ReadOnlyAdmin):
    """The page, and the fragment that the page loads every five seconds while it is visible."""

    class Media:
        """The script loads the fragment. Without it, a link loads the page again."""

        js = ("django_pglock/overview.js",)

    def get_urls(self) -> list[URLPattern]:
        """Return the page, under the name of a list so that the admin links to it, and the fragment."""
        return [
            self.own_path("", "changelist", self.page_view),
            self.own_path("now/", "fragment", self.fragment_view),
        ]

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return whether the user may view any of the pages of this package."""
        facts = Facts(request, self.admin_site)
        return any(facts.may_view(model) for model in VIEWED)

    def has_module_permission(self, request: HttpRequest) -> bool:
        """Return whether the index lists the page."""
        return self.has_view_permission(request)

    def page_view(self, request: HttpRequest) -> HttpResponse:
        """Show the page."""
        # The fragment has the query string of the page, because it must show the same.
        query = request.GET.urlencode()
        url = f"{self.address('fragment')}?{query}" if query else self.address("fragment")
        about = {"title": capfirst(self.opts.verbose_name), "fragment_url": url}
        return self.answer(request, "overview/page", {**about, **self._sections(request)})

    def fragment_view(self, request: Any) -> HttpResponse:
        """Answer with the part that changes."""
        request.current_app = self.admin_site.name
        return TemplateResponse(request, "admin/django_pglock/overview/fragment.html", self._sections(request))

    def _sections(self, request: HttpRequest) -> dict[str, Any]:
        """Return what the fragment shows. Raises ``PermissionDenied``."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        facts = Facts(request, self.admin_site)
        context: dict[str, Any] = {"sentences": list(attention(facts))}
        if facts.may_view(Task):
            queues = queue_table(facts)
            choice = choice_of(request, {*(each["name"] for each in queues["rows"]), *facts.ages, *facts.paused})
            context |= {"queues": queues, "choice": choice, "charts": charts_of(facts.using, choice)}
        if facts.may_view(Worker):
            context["workers"] = worker_table(facts)
        return context
