"""The list of tasks, for tables of ten million rows: each query reads along an index or stops early."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.contrib import admin
from django.core.paginator import Paginator
from django.db.models import Exists
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.http import urlencode
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from django_pglock.admin.pages import AtLeast, CappedChangeList, elapsed, mark
from django_pglock.admin.task_filters import (
    candidates,
    first_searched,
    is_by_key,
    is_indexed,
    searched_status,
    status_of,
    time_range,
)
from django_pglock.admin.task_summary import last_failures
from django_pglock.models import Task, Worker
from django_pglock.store.count import MOST_SEARCHED, search_end
from django_pglock.store.id_range import above_succeeded, id_in
from django_pglock.tasks import registry
from django_pglock.tasks.states import TaskStatus


class TaskChangeList(CappedChangeList):
    """Reads along the index that fits the filters. If no index fits, searches only the newest tasks.

    A search counts nothing: it stops behind the last task that the page shows. If it has found none among a few
    thousand tasks, it reads on, once.
    """

    #: The id at which the search among the newest tasks stopped; None if it has reached the oldest task.
    search_end: int | None = None
    #: The number of tasks that were searched at most.
    searched = 0
    #: The id above which only samples were searched, because waiting tasks have higher ids than successful tasks.
    skipped_above: int | None = None
    #: Whether more rows match than the page shows.
    has_more = False

    def get_results(self, request: HttpRequest) -> None:
        """Find the tasks of the page, and the last failure of each. Actions on all matches are not limited."""
        self.matching = self.queryset
        self.queryset = self.queryset.annotate(
            lacks_worker=~Exists(Worker.objects.all().alive()) & Exists(Task.objects.all().ready()),
        )
        if is_search(request, self.query):
            self._search(request)
        else:
            super().get_results(request)
            self.has_more = self.is_capped or self.page_num < self.paginator.num_pages
        self.result_list: Any = list(self.result_list)
        failures = last_failures(self.root_queryset.db, self.result_list)
        for task in self.result_list:
            task.last_failure = failures.get(task.pk)

    def _search(self, request: HttpRequest) -> None:
        rows: list[Any] = []
        for most, below, end in self._searches(request):
            self.searched, self.skipped_above, self.search_end = most, below, end
            limits = {lookup: id_ for lookup, id_ in (("pk__lt", below), ("pk__gt", end)) if id_}
            rows = list(self.queryset.filter(**limits)[: self.list_per_page + 1])
            if rows:
                break
        self.has_more = len(rows) > self.list_per_page
        self.result_count = AtLeast(len(rows)) if self.has_more or self.search_end or self.skipped_above else len(rows)
        self.result_list = rows[: self.list_per_page]
        self.paginator = Paginator(self.result_list, self.list_per_page)
        self.show_admin_actions, self.full_result_count = True, None
        self.show_full_result_count = self.can_show_all = self.multi_page = False

    def _searches(self, request: HttpRequest) -> Iterator[tuple[int, int | None, int | None]]:
        """Yield one search after the other, as (number of tasks, id above them, id below them). None: no limit."""
        using, most, below = self.root_queryset.db, first_searched(request), None
        found = time_range(request, using)
        tasks, end = candidates(request, using).filter(**found.ids), found.end
        if found.ids:
            yield most, None, end
            if end is None:
                return
        if status_of(request) == TaskStatus.SUCCESSFUL and not request.GET.get("id__lt"):
            below = above_succeeded(using)
            tasks = tasks.filter(pk__lt=below) if below is not None else tasks
        for each in (most, MOST_SEARCHED) if below is not None or not found.ids else (MOST_SEARCHED,):
            end = search_end(tasks, most=each)
            yield each, below, end
            if end is None or each == MOST_SEARCHED:
                return

    def rows_for_export(self, request: HttpRequest, *, most: int) -> Any:
        """Return all tasks that match; if no index serves the filters, those among the newest ``most`` tasks."""
        if not is_search(request, self.query):
            return self.matching
        using = self.root_queryset.db
        end = search_end(candidates(request, using).filter(**time_range(request, using).ids), most=most)
        return self.matching.filter(pk__gt=end) if end else self.matching

    @property
    def is_without_worker(self) -> bool:
        """Whether tasks are ready, and no worker is alive that could run them."""
        return bool(self.result_list) and self.result_list[0].lacks_worker

    @property
    def older_query(self) -> str:
        """The query string of the tasks below the last one shown or, after a limited search, of those not searched."""
        ids = [each.pk for each in self.result_list]
        if ids and self.has_more and ids == sorted(ids, reverse=True):
            return self.get_query_string({"id__lt": ids[-1]}, remove=["p"])
        if self.search_end is not None:
            return self.get_query_string({"id__lt": self.search_end + 1}, remove=["p"])
        return ""

    def get_ordering(self, request: HttpRequest, queryset: Any) -> list[Any]:
        """Sort by id; if an index on statuses and ids serves the list, in the order of this index."""
        ordering: list[Any] = super().get_ordering(request, queryset)
        # The indexes of failed tasks by queue and by function have no status: with it, the count would read each row.
        if not (searched_status(request) or is_by_key(request)):
            return ordering
        direction = "-" if ordering[0].startswith("-") else ""
        return [f"{direction}status", *ordering]


def is_search(request: HttpRequest, query: str) -> bool:
    """Return whether no index serves the list, so that only the newest tasks are searched."""
    return not is_indexed(request) or bool(query and not query.strip().isdigit())


def find(queryset: Any, term: str, *, newest_only: bool) -> Any:
    """Filter tasks by id, by the name of the function, or by the beginning of its path. JSON columns are never read.

    ``newest_only``: search only as many tasks as the list does, because there is no index on functions.
    """
    if term.isascii() and term.isdigit():
        number = id_in(term)
        return queryset.none() if number is None else queryset.filter(pk=number)
    # This process knows all paths, and they are few, so the query has a list of values instead of a pattern.
    paths = [path for path in registry.known_paths() if path.startswith(term) or path.endswith(f".{term}")]
    found = queryset.filter(task_path__in=[term.replace("\x00", ""), *paths])
    newest = Task.objects.using(queryset.db).order_by("-pk")
    if newest_only and (end := search_end(newest, most=MOST_SEARCHED)):
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


@admin.display(description=_("last failure"))
def last_failure(task: Any) -> str:
    """Return the exception of the last failed attempt, as a link to all failures with it, and its message."""
    if task.last_failure is None:
        return "-"
    path, message = task.last_failure
    return format_html(
        '<span class="pglock-failure" title="{}"><a href="?{}">{}</a>{}</span>',
        message,
        urlencode({"exception": path}),
        path.rpartition(".")[2],
        f": {message}" if message else "",
    )


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
