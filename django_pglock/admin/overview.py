"""The overview: problems, queues, workers, and charts. The part that changes is also served as a fragment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from itertools import groupby
from typing import Any, NamedTuple
from uuid import UUID

from django.apps import apps
from django.apps.registry import Apps
from django.core.exceptions import PermissionDenied
from django.db import models
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils import timezone
from django.utils.functional import cached_property
from django.utils.http import urlencode
from django.utils.text import capfirst
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _
from django.views.decorators.http import require_safe

from django_pglock.admin.charts import charts_of, choice_of
from django_pglock.admin.overview_attention import attention
from django_pglock.admin.pages import AtLeast, ReadOnlyAdmin, elapsed
from django_pglock.models import AdvisoryLock, Lease, Queue, Schedule, Task, Worker
from django_pglock.store.count import QueueCounts
from django_pglock.store.numbers import BETWEEN_DEPTHS, depths, finished_per_minute
from django_pglock.tasks.compat import task_backends

#: A user who may view one of these models may view the overview. Each section shows only data that the user may view.
VIEWED = (Task, Worker, Queue, Schedule, AdvisoryLock, Lease)
#: Running tasks and workers that are read; rows of a table, and tasks of one worker, that are shown.
MOST_RUNNING, MOST_WORKERS, MOST_SHOWN, FEW = 1000, 200, 20, 3
#: Seconds after which the page counts by itself: no worker counts.
MAX_AGE = BETWEEN_DEPTHS + 5


class RunningTask(NamedTuple):
    """A task that a worker runs, and since when."""

    worker: UUID
    id: int
    task_path: str
    queue: str
    since: datetime

    @property
    def name(self) -> str:
        """The name of the function without its module."""
        return self.task_path.rpartition(".")[2]


class Facts:
    """What the overview reads, each by one statement with a limit and at most once, and what its user may view."""

    def __init__(self, request: HttpRequest, site: Any) -> None:
        self.request = request
        self.site = site
        self.using = str(Task.objects.db)

    def may_view(self, model: Any) -> bool:
        """Return whether this admin site has pages of the model that the user may view."""
        site = self.site
        return bool(site.is_registered(model) and site.get_model_admin(model).has_view_permission(self.request))

    def address(self, page: str, *arguments: Any, **query: Any) -> str:
        """Return the address of a page, such as ``task_changelist``, with a query string."""
        url = reverse(f"admin:django_pglock_{page}", args=arguments, current_app=self.site.name)
        return f"{url}?{urlencode(query)}" if query else url

    @cached_property
    def workers(self) -> list[Worker]:
        """The living workers, by name, without the functions that they know."""
        alive = Worker.objects.using(self.using).all().alive()
        return list(alive.defer("task_paths").order_by("name", "pk")[:MOST_WORKERS])

    @cached_property
    def running(self) -> list[RunningTask]:
        """Running tasks, by worker and id."""
        rows = Task.objects.using(self.using).filter(status="RUNNING").order_by("worker", "pk")
        fields = ("worker", "pk", "task_path", "queue", "last_attempted_at")
        return [RunningTask(*row) for row in rows.values_list(*fields)[:MOST_RUNNING]]

    @cached_property
    def depths(self) -> Mapping[str, QueueCounts]:
        """The tasks of each queue by status, as counted within the last seconds; those with the oldest ready first."""
        found = depths(self.using, max_age=MAX_AGE)
        return {each.queue: each for each in sorted(found, key=lambda each: -(each.oldest_ready or 0.0))}

    @cached_property
    def ages(self) -> Mapping[str, float]:
        """The queues that have ready tasks, and the age of the oldest in seconds; those with the oldest first."""
        return {queue: each.oldest_ready for queue, each in self.depths.items() if each.oldest_ready is not None}

    @cached_property
    def paused(self) -> Mapping[str, Queue]:
        """The queues that are paused, those for longest first."""
        return {queue.pk: queue for queue in Queue.objects.using(self.using).paused().order_by("paused_at", "name")}

    def rates(self, queues: list[str]) -> dict[str, float]:
        """Return how many tasks of these queues finished in a minute, on average of the last minutes."""
        return finished_per_minute(self.using, queues)


def queue_table(facts: Facts) -> dict[str, Any]:
    """Return the queues, the urgent ones first: with the oldest ready tasks, paused, with running tasks, configured."""
    configured = [queue for backend in task_backends.all() for queue in sorted(backend.queues)]
    running = [queue for queue, each in facts.depths.items() if each.counts["RUNNING"]]
    names = list(dict.fromkeys([*facts.ages, *facts.paused, *running, *configured]))
    rates = facts.rates(names[:MOST_SHOWN])
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


def _worker_row(facts: Facts, worker: Worker, running: list[RunningTask]) -> dict[str, Any]:
    """Return one living worker: which queues it serves, its first running tasks, and how many more run."""
    oldest = sorted(running, key=lambda task: task.since)
    return {
        "name": worker.name,
        "url": facts.address("worker_change", worker.pk),
        "queues": ", ".join(worker.queues) or gettext("all"),
        "since": elapsed(worker.started_at),
        "is_stopping": worker.is_stopping,
        "tasks": list(_shown_tasks(facts, oldest[:FEW])),
        "more": len(oldest) - FEW,
    }


def _shown_tasks(facts: Facts, running: list[RunningTask]) -> Iterator[tuple[str, str]]:
    """Yield the text and the address of each task."""
    for task in running:
        text = gettext("%(task)s #%(id)s for %(time)s")
        yield (
            text % {"task": task.name, "id": task.id, "time": elapsed(task.since)},
            facts.address("task_change", task.id),
        )


class Overview(models.Model):
    """The name under which admin sites list the overview. It has no table, and migrations do not know it.

    It is outside of the registry of models, as Django's own model of applied migrations is.
    """

    class Meta:
        """Where the admin shows it."""

        apps = Apps()
        app_label = "django_pglock"
        managed = False
        default_permissions = ()
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
        page, fragment = (
            require_safe(self.admin_site.admin_view(each)) for each in (self.page_view, self.fragment_view)
        )
        return [
            path("", page, name="django_pglock_overview_changelist"),
            path("now/", fragment, name="django_pglock_overview_fragment"),
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
        site = self.admin_site
        url = reverse("admin:django_pglock_overview_fragment", current_app=site.name)
        # The fragment has the query string of the page, because it must show the same.
        query = request.GET.urlencode()
        # Not "opts": themes ask them for the app's name, and the options of a model without registry have none.
        about = {"app_label": self.opts.app_label, "title": capfirst(self.opts.verbose_name), "media": self.media}
        about["app_name"] = apps.get_app_config(self.opts.app_label).verbose_name
        about["fragment_url"] = f"{url}?{query}" if query else url
        return self._answer(request, "page", {**site.each_context(request), **about})

    def fragment_view(self, request: HttpRequest) -> HttpResponse:
        """Answer with the part that changes."""
        return self._answer(request, "fragment", {})

    def _answer(self, request: HttpRequest, template: str, context: dict[str, Any]) -> HttpResponse:
        if not self.has_view_permission(request):
            raise PermissionDenied
        request.current_app = self.admin_site.name
        facts = Facts(request, self.admin_site)
        context["sentences"] = attention(facts)
        if facts.may_view(Task):
            queues = queue_table(facts)
            choice = choice_of(request, facts, [queue["name"] for queue in queues["rows"]])
            context |= {"queues": queues, "choice": choice, "charts": charts_of(facts, choice)}
        if facts.may_view(Worker):
            context["workers"] = worker_table(facts)
        return TemplateResponse(request, f"admin/django_pglock/overview/{template}.html", context)
