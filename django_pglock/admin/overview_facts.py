"""The facts that the overview reads from the database: each by one statement with a limit, and at most once."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from django.http import HttpRequest
from django.urls import reverse
from django.utils.functional import cached_property
from django.utils.http import urlencode

from django_pglock.models import Queue, Task, Worker
from django_pglock.store.count import QueueCounts
from django_pglock.store.numbers import BETWEEN_DEPTHS, depths, finished_per_minute

#: Running tasks and workers that are read.
MOST_RUNNING, MOST_WORKERS = 1000, 200
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
    """The facts for one request, and the permissions of its user."""

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
