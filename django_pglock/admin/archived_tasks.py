"""The admin pages of archived tasks: a list of one day at a time, and the page of one task. Nothing can be changed."""

from __future__ import annotations

from datetime import date
from typing import Any, ClassVar

from django.contrib import admin
from django.contrib.admin.options import IncorrectLookupParameters
from django.core.paginator import Paginator
from django.http import HttpRequest
from django.utils.html import format_html, format_html_join
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from django_pglock.admin import task_page, task_summary
from django_pglock.admin.pages import AtLeast, CappedChangeList, ReadOnlyAdmin, filled_fieldsets
from django_pglock.admin.task_filters import QueueFilter, TaskPathFilter
from django_pglock.admin.task_list import attempts_made, find, name_and_id, queue_name, status_mark, wait_or_run_time
from django_pglock.store.archive_state import archive_state
from django_pglock.store.archived import bounds_of_day
from django_pglock.store.attempts import failures_of
from django_pglock.store.count import MOST_SEARCHED, search_end
from django_pglock.store.id_range import id_in
from django_pglock.tasks.redaction import shown

#: The most days that the filter offers. The address of the page takes any day.
MOST_DAYS_SHOWN = 31


class DayFilter(admin.SimpleListFilter):
    """Filter by the day, by UTC, on which the tasks ended: one day at a time, the newest one at first.

    Only the partition of this day is read. If the user searches for an id, all days are.
    """

    title = _("day of the end (UTC)")
    parameter_name = "day"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Return the days that the archive has, the newest first."""
        days = archive_state(model_admin.get_queryset(request).db).days
        return [(str(day), str(day)) for day in reversed(days[-MOST_DAYS_SHOWN:])]

    def has_output(self) -> bool:
        """Return True: the day in the address is read also if the archive is empty."""
        return True

    def value(self) -> str | None:
        """Return the chosen day; by default the newest."""
        return super().value() or next((str(value) for value, _label in self.lookup_choices), None)

    def choices(self, changelist: Any) -> Any:
        """Yield the days. There is no choice for all of them."""
        choices = super().choices(changelist)
        next(iter(choices))
        yield from choices

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        """Return the tasks that ended on the day. Raises ``IncorrectLookupParameters`` for a text that is no day."""
        text = self.value()
        if text is None or is_for_id(request):
            return queryset
        try:
            start, end = bounds_of_day(queryset.db, date.fromisoformat(text))
        except (ValueError, OverflowError):
            raise IncorrectLookupParameters from None
        return queryset.filter(finished_at__gte=start, finished_at__lt=end)


class ArchivedTaskChangeList(CappedChangeList):
    """Counts up to 10,000 tasks of a day. No index has queues or functions, so these are searched in the newest tasks.

    A search counts nothing: it stops behind the last task that the page shows.
    """

    #: The id at which the search among the newest tasks of the day stopped; None if it has reached the oldest task.
    search_end: int | None = None
    #: The number of tasks that were searched at most.
    searched = 0

    def get_results(self, request: HttpRequest) -> None:
        """Find the tasks of the page."""
        is_search = any(request.GET.get(name, "").strip() for name in ("queue", "task_path")) or self.query
        if not is_search or is_for_id(request):
            super().get_results(request)
            return
        self.searched = MOST_SEARCHED
        self.search_end = search_end(self._of_the_day(request), most=MOST_SEARCHED)
        rows = self.queryset.filter(pk__gt=self.search_end) if self.search_end else self.queryset
        found = list(rows[: self.list_per_page + 1])
        self.result_list: Any = found[: self.list_per_page]
        self.has_more = len(found) > self.list_per_page
        self.result_count = AtLeast(len(self.result_list)) if self.has_more or self.search_end else len(found)
        self.paginator = Paginator(self.result_list, self.list_per_page)
        self.show_admin_actions, self.full_result_count = False, None
        self.show_full_result_count = self.can_show_all = self.multi_page = False

    #: Whether more rows match than the page shows.
    has_more = False

    @property
    def older_query(self) -> str:
        """The query string of the tasks below the last one shown, or of those that were not searched."""
        if self.has_more:
            return self.get_query_string({"id__lt": self.result_list[-1].pk}, remove=["p"])
        if self.search_end is not None:
            return self.get_query_string({"id__lt": self.search_end + 1}, remove=["p"])
        return ""

    def _of_the_day(self, request: HttpRequest) -> Any:
        """Return all tasks of the chosen day, the newest first."""
        rows = self.root_queryset.order_by("-pk")
        if (below := id_in(request.GET.get("id__lt", ""))) is not None:
            rows = rows.filter(pk__lt=below)
        for each in self.filter_specs:
            if isinstance(each, DayFilter):
                rows = each.queryset(request, rows)
        return rows


@admin.display(description=_("failed and lost attempts"))
def shown_failed_attempts(task: Any) -> str:
    """Return the attempts before the one that succeeded, each with its traceback, folded."""
    parts = (
        (attempt.number, attempt.get_outcome_display(), attempt.exception_path, attempt.traceback)
        for attempt in failures_of(task)
    )
    text = '<details><summary>{} · {} · {}</summary><pre class="pglock-trace" tabindex="0">{}</pre></details>'
    return format_html_join("", text, parts)


def key(name: str) -> Any:
    """Return the field of a key, redacted."""

    def shown_key(task: Any) -> str:
        return format_html("{}", shown(task, name))

    shown_key.__name__ = f"shown_{name}"
    return admin.display(description=getattr(task_page, f"shown_{name}").short_description)(shown_key)


@admin.display(description=_("worker"))
def shown_worker(task: Any) -> str:
    """Return the id of the worker of the last attempt."""
    return str(task.worker or "-")


class ArchivedTaskAdmin(ReadOnlyAdmin):
    """The list of archived tasks, which the list of tasks links to, and the page of one."""

    list_display: Any = [name_and_id, queue_name, attempts_made, wait_or_run_time, "enqueued_at", "finished_at"]
    list_filter = (DayFilter, QueueFilter, TaskPathFilter)
    #: The link "Older tasks".
    linked_lookups = ("id__lt",)
    search_fields = ["task_path"]
    search_help_text = _("The id of a task, the name of its function, or the beginning of the path of its function.")
    ordering = ["-id"]
    sortable_by: ClassVar[Any] = []
    actions = None
    change_list_template = "admin/django_pglock/archivedtask/change_list.html"
    change_form_template = "admin/django_pglock/archivedtask/change_form.html"
    fieldsets: ClassVar[Any] = [
        (
            None,
            {
                "fields": [
                    *(task_page.shown_task_path, status_mark, task_page.shown_queue, "priority", "backend"),
                    shown_worker,
                ]
            },
        ),
        (
            _("Call"),
            {
                "fields": [
                    *(task_page.shown_args, task_page.shown_kwargs, task_page.shown_progress),
                    *(task_page.shown_result, task_page.shown_meta),
                ]
            },
        ),
        (_("Keys"), {"fields": [key("lock_key"), "concurrency", *map(key, ("group_key", "fair_key", "unique_key"))]}),
        (
            _("Attempts"),
            {
                "fields": [
                    *(attempts_made, "retries", "max_retries", "rescues"),
                    *(shown_failed_attempts, task_page.shown_log),
                ]
            },
        ),
        (
            _("Times"),
            {
                "fields": [
                    *map(task_page.moment, ("enqueued_at", "run_after", "started_at", "last_attempted_at")),
                    *map(task_page.moment, ("cancel_requested_at", "finished_at")),
                ]
            },
        ),
    ]

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ArchivedTaskChangeList]:
        """Return our change list."""
        return ArchivedTaskChangeList

    def get_queryset(self, request: HttpRequest) -> Any:
        """Do not load the columns that the list does not show."""
        rows = super().get_queryset(request)
        match = request.resolver_match
        is_page = match is not None and match.url_name == "django_pglock_archivedtask_change"
        return rows if is_page else rows.defer(*LARGE_COLUMNS)

    def get_search_results(self, request: HttpRequest, queryset: Any, search_term: str) -> tuple[Any, bool]:
        """Search by id, by the name of the function, or by the beginning of its path."""
        term = search_term.strip()
        return (find(queryset, term, newest_only=False) if term else queryset), False

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[Any]:
        """Return all fields: none is editable."""
        return [field for _title, options in self.fieldsets for field in options["fields"]]

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        """Leave out the fields that are empty."""
        return filled_fieldsets(self.fieldsets, obj)

    def context_of(self, request: HttpRequest, obj: Any) -> dict[str, Any]:
        """Return the state in a sentence, and the tasks after which this one has run."""
        return {
            "pglock_state": task_summary.sentence(obj),
            "pglock_tick": task_summary.tick_of(obj),
            "pglock_before": task_summary.before_and_after(obj)[0],
            "pglock_note": gettext("This task is in the archive. It is deleted with all tasks that ended on its day."),
        }

    def get_model_perms(self, request: HttpRequest) -> dict[str, bool]:
        """Return nothing: the index and the sidebar list tasks, and their list has the link."""
        return {}

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return whether the user may view tasks: archived tasks have no permission of their own."""
        return request.user.has_perm("django_pglock.view_task")


#: The columns that may have megabytes.
LARGE_COLUMNS = ("args", "kwargs", "result", "meta", "log", "progress", "failed_attempts")


def is_for_id(request: HttpRequest) -> bool:
    """Return whether the user searches for the id of a task."""
    term = request.GET.get("q", "").strip()
    return term.isascii() and term.isdigit()
