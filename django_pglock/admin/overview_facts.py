"""The facts that the overview reads from the database: each by one statement with a limit, and at most once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from django.http import HttpRequest
from django.urls import reverse
from django.utils.functional import cached_property
from django.utils.http import urlencode

from django_pglock.admin.pages import capped
from django_pglock.models import Queue, Task, Worker
from django_pglock.store.count import failed_counts, ready_counts
from django_pglock.store.history import finished_per_minute

#: Running tasks that are read, tasks of a queue that are counted, and workers that are read.
MOST_RUNNING, MOST_IN_QUEUE, MOST_WORKERS = 1000, 1000, 200
#: Queues with ready tasks are compared by the age of the oldest task, so a few tasks of each are enough.
OLDEST = 3


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
    def ages(self) -> Mapping[str, float]:
        """The queues that have ready tasks, and the age of the oldest in seconds; those with the oldest first."""
        found = {queue: age or 0.0 for queue, (_, age) in ready_counts(self.using, most=OLDEST).items()}
        return dict(sorted(found.items(), key=lambda each: -each[1]))

    @cached_property
    def paused(self) -> Mapping[str, Queue]:
        """The queues that are paused, those for longest first."""
        return {queue.pk: queue for queue in Queue.objects.using(self.using).paused().order_by("paused_at", "name")}

    def depths(self, queues: list[str]) -> dict[str, int]:
        """Return how many tasks of these queues are ready."""
        found = ready_counts(self.using, queues, most=MOST_IN_QUEUE + 1)
        return {queue: capped(count, MOST_IN_QUEUE) for queue, (count, _) in found.items()}

    def failed(self, queues: list[str]) -> dict[str, int]:
        """Return how many tasks of these queues have failed."""
        found = failed_counts(self.using, queues, most=MOST_IN_QUEUE + 1)
        return {queue: capped(count, MOST_IN_QUEUE) for queue, count in found.items()}

    def rates(self, queues: list[str]) -> dict[str, float]:
        """Return how many tasks of these queues finished in a minute, on average of the last minutes."""
        return finished_per_minute(self.using, queues)

    @cached_property
    def running_by_queue(self) -> Mapping[str, int]:
        """How many tasks of each queue run."""
        return Counter(task.queue for task in self.running)
