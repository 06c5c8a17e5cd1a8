"""The list of tasks, for tables of ten million rows: each query reads along an index or stops early."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from django_pglock.admin.pages import AtLeast, CappedChangeList, elapsed, mark
from django_pglock.admin.task_filters import is_narrow, status_of
from django_pglock.models import Task, Worker
from django_pglock.store.count import in_status, search_end
from django_pglock.tasks import registry
from django_pglock.tasks.states import TaskStatus


class TaskChangeList(CappedChangeList):
    """Reads along the index that fits the filters. If no index fits, searches only the newest tasks."""

    #: The id at which the search among the newest tasks stopped; None if it has reached the oldest task.
    search_end: int | None = None

    def get_results(self, request: HttpRequest) -> None:
        """Limit a search that no index serves to the newest tasks. Actions on all matches are not limited."""
        # Indexes know the queues and the functions of failed tasks, and which tasks are stuck.
        is_unindexed = is_narrow(request) and status_of(request) != TaskStatus.FAILED
        is_search = is_unindexed or (self.query and not self.query.strip().isdigit())
        if is_search and not request.GET.get("attention"):
            self.search_end = search_end(self._searched(request))
        if self.search_end is not None:
            self.queryset = self.queryset.filter(pk__gt=self.search_end)
        super().get_results(request)
        if self.search_end is not None:
            self.result_count = AtLeast(self.result_count)

    @property
    def is_without_worker(self) -> bool:
        """Whether tasks are ready, and no worker is alive that could run them."""
        using = self.root_queryset.db
        return not Worker.objects.using(using).alive().exists() and Task.objects.using(using).ready().exists()

    def _searched(self, request: HttpRequest) -> Any:
        status, below = status_of(request), request.GET.get("id__lt")
        rows = Task.objects.using(self.root_queryset.db)
        rows = in_status(rows, status).order_by("-status", "-pk") if status else rows.order_by("-pk")
        return rows.filter(pk__lt=below) if below else rows

    @property
    def older_query(self) -> str:
        """The query string of the tasks below the last one shown or, after a limited search, of those not searched."""
        rows = list(self.result_list)
        has_more = self.is_capped or self.page_num < self.paginator.num_pages
        if rows and has_more and rows[0].pk >= rows[-1].pk:
            return self.get_query_string({"id__lt": rows[-1].pk}, remove=["p"])
        if self.search_end is not None:
            return self.get_query_string({"id__lt": self.search_end + 1}, remove=["p"])
        return ""

    def get_ordering(self, request: HttpRequest, queryset: Any) -> list[Any]:
        """Sort by id; if the list is filtered by a status, in the order of the index on status and id."""
        ordering: list[Any] = super().get_ordering(request, queryset)
        direction = "-" if ordering[0].startswith("-") else ""
        return [f"{direction}status", *ordering] if status_of(request) else ordering


def find(queryset: Any, term: str, *, newest_only: bool) -> Any:
    """Filter tasks by id, by the name of the function, or by the beginning of its path. JSON columns are never read.

    ``newest_only``: search only as many tasks as the list does, because there is no index on functions.
    """
    if term.isascii() and term.isdigit():
        return queryset.filter(pk=int(term)) if int(term) < 2**63 else queryset.none()
    # This process knows all paths, and they are few, so the query has a list of values instead of a pattern.
    paths = [path for path in registry.known_paths() if path.startswith(term) or path.endswith(f".{term}")]
    found = queryset.filter(task_path__in=[term.replace("\x00", ""), *paths])
    if newest_only and (end := search_end(Task.objects.using(queryset.db).order_by("-pk"))):
        found = found.filter(pk__gt=end)
    return found


# Columns. The page of a task shows them, too.


@admin.display(description=_("task"), ordering="-id")
def name_and_id(task: Task) -> str:
    """Return the name of the function and the id of the task."""
    return format_html(
        '<span class="pglock-name" title="{}">{}</span> <span class="pglock-id">#{}</span>',
        task.task_path,
        task.name,
        task.pk,
    )


@admin.display(description=_("queue"))
def queue_name(task: Task) -> str:
    """Return the queue, cut if its name is long: it would push the other columns off the screen."""
    return format_html('<span class="pglock-name" title="{0}">{0}</span>', task.queue)


@admin.display(description=_("status"))
def status_mark(task: Task) -> str:
    """Return the status in its colour, with a note if a cancel was requested."""
    is_asked = task.status == "RUNNING" and task.cancel_requested_at is not None
    # Not inside of an f-string, where makemessages does not find it.
    asked = gettext("cancel requested")
    note = f" ({asked})" if is_asked else ""
    return format_html("{}{}", mark(task.status.lower(), task.get_status_display()), note)


@admin.display(description=_("attempts"))
def attempts_made(task: Task) -> int:
    """Return how often the function was started."""
    return task.attempts_made


@admin.display(description=_("wait or run time"))
def wait_or_run_time(task: Task) -> str:
    """Return how long the task has waited so far, has run so far or, once it is finished, ran."""
    if task.finished_at:
        if not task.started_at:
            return "-"
        took = (task.finished_at - task.started_at).total_seconds()
        return gettext("%(seconds).3f s") % {"seconds": took}
    return elapsed((task.status == "RUNNING" and task.last_attempted_at) or task.enqueued_at)
