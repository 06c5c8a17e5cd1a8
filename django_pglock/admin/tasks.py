"""The admin of tasks: the columns of the list, the fields of the page, actions, buttons and permissions."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from django.contrib import admin
from django.contrib.admin.views.main import ERROR_FLAG
from django.contrib.messages import WARNING
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import URLPattern
from django.utils import timezone
from django.utils.html import format_html
from django.utils.http import urlencode
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from django_pglock.admin import task_page as page
from django_pglock.admin.enqueue import enqueue_page
from django_pglock.admin.pages import SECONDS, ReadOnlyAdmin, admin_action, elapsed, mark, needs
from django_pglock.admin.task_list import FILTERS, IndexedList, StatusFilter, export_view, find
from django_pglock.models import Task
from django_pglock.store.operate import VERBS, Verb
from django_pglock.store.why_it_waits import why_it_waits
from django_pglock.tasks.states import TaskStatus

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


@admin.display(description=_("status"))
def status_mark(task: Task) -> str:
    """Return the status in its colour, with a note if a cancel was requested."""
    is_asked = task.status == "RUNNING" and task.cancel_requested_at is not None
    # Not inside of an f-string, where makemessages does not find it.
    asked = gettext("cancel requested")
    note = f" ({asked})" if is_asked else ""
    return format_html("{}{}", mark(task.status.lower(), task.get_status_display()), note)


@admin.display(description=_("status"))
def status_and_failure(task: Any) -> str:
    """Return the status, the number of attempts if it is not one, and below them the last failure."""
    times = (
        format_html(' <span class="pglock-id">&times;{}</span>', task.attempts_made) if task.attempts_made > 1 else ""
    )
    return format_html("{}{}<div>{}</div>", status_mark(task), times, last_failure(task))


def last_failure(task: Any) -> str:
    """Return the exception of the last failed attempt, as a link to all failures with it, and its message."""
    if task.last_failure is None:
        return ""
    path, message, cause = task.last_failure
    if cause is not None:
        return format_html(gettext("Because of {link}"), link=format_html('<a href="{}/change/">#{}</a>', cause, cause))
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


@admin.display(description=_("concurrency"))
def concurrency(task: Task) -> int | None:
    """Return how many tasks of the key, or runs of the group, there may be at once. The row of a task may negate it."""
    return task.concurrency and abs(task.concurrency)


@admin.display(description=_("duration"))
def wait_or_run_time(task: Task) -> str:
    """Return how long the task has waited or run so far or, once it is finished, how long its last attempt ran."""
    if task.finished_at:
        if not task.last_attempted_at:
            return "-"
        took = (task.finished_at - task.last_attempted_at).total_seconds()
        return gettext("%(seconds).3f s") % {"seconds": took}
    return elapsed((task.status == "RUNNING" and task.last_attempted_at) or task.enqueued_at)


@admin.display(description=_("enqueued"))
def enqueued(task: Task) -> str:
    """Return how long ago the task was enqueued, and when as a title."""
    at = timezone.localtime(task.enqueued_at) if timezone.is_aware(task.enqueued_at) else task.enqueued_at
    return format_html('<span title="{}">{}</span>', f"{at:{SECONDS}}", elapsed(task.enqueued_at))


@admin.register(Task)
class TaskAdmin(ReadOnlyAdmin):
    """The list of tasks and the page of one task, with the verbs of tasks as actions and buttons."""

    # Django accepts functions here; django-stubs does not.
    list_display: Any = [name_and_id, status_and_failure, "queue", "priority", wait_or_run_time, enqueued]
    left_out_if_equal = ("queue", "priority")
    list_filter = [("status", StatusFilter), *FILTERS]
    #: The link "Older tasks", and the links from groups of failures.
    linked_lookups = ("id__lt", "fingerprint__exact")
    search_fields = ["task_path"]
    search_help_text = _("The id of a task, the name of its function, or the beginning of the path of its function.")
    ordering = ["-id"]
    # For each failed task of a page some pages of the database are read: its row and its last attempt.
    list_per_page = 30
    sortable_by: ClassVar[Any] = [name_and_id]
    verbs = VERBS
    actions = [admin_action(verb) for verb in VERBS.values()]
    change_list = IndexedList
    change_list_template = "admin/django_pglock/task/change_list.html"
    change_form_template = "admin/django_pglock/task/change_form.html"
    #: Titles and fields of the page of a task. Those that are empty are left out.
    sections: ClassVar[Any] = [
        (None, (page.as_link("task_path"), status_mark, page.as_link("queue"), "priority", "backend", page.worker)),
        (
            _("Call"),
            (*map(page.as_json, ("args", "kwargs", "progress", "result")), page.as_json("meta", _("metadata"))),
        ),
        (
            _("Keys"),
            (
                *(page.as_link("lock_key", "key"), concurrency, page.as_text("group_key"), page.as_text("fair_key")),
                *(page.as_text("unique_key"), "unique_until"),
            ),
        ),
        (_("Attempts"), (attempts_made, "retries", "max_retries", "rescues", page.log)),
        (
            _("Times"),
            (
                *map(page.as_moment, ("enqueued_at", "run_after", "started_at", "last_attempted_at")),
                *map(page.as_moment, ("cancel_requested_at", "finished_at", "expires_at")),
            ),
        ),
    ]

    has_retry_permission = needs("retry_task")
    has_cancel_permission = needs("cancel_task")
    has_reset_permission = needs("reset_task")
    has_export_permission = needs("export_task")
    has_stack_permission = needs("stack_task")
    has_remove_permission = needs("delete_task")
    #: To enqueue any function is to add a task. To move tasks, or to run one again, is to change tasks.
    has_enqueue_permission = needs("add_task")
    has_again_permission = has_move_permission = needs("change_task")

    # The list

    def get_search_results(self, request: HttpRequest, queryset: Any, search_term: str) -> tuple[Any, bool]:
        """Search by id, by the name of the function, or by the beginning of its path; for choices of a form, by id."""
        term = search_term.strip()
        if getattr(request.resolver_match, "url_name", "") == "autocomplete" and not term.isdigit():
            # A form asks for each letter that a user types, and there is no index on functions.
            return queryset.none(), False
        return (find(queryset, term) if term else queryset), False

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        """Add whether the user may export and enqueue. Say so if Django has dropped the filters."""
        if "status" in request.GET:
            # As people write it. Django's name of the filter is longer.
            query = request.GET.copy()
            query["status__exact"] = query.pop("status")[-1].upper()
            return HttpResponseRedirect(f"{request.path}?{query.urlencode()}")
        if ERROR_FLAG in request.GET:
            self.message_user(request, gettext("A filter could not be read, so the list is not filtered."), WARNING)
        may = {"export": self.has_export_permission(request), "enqueue": self.has_enqueue_permission(request)}
        return super().changelist_view(request, {"pglock_may": may, **(extra_context or {})})

    # The page of one task

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        """Leave out the fields that are empty."""
        return page.filled(self.sections, obj)

    def verbs_of(self, row: Any) -> list[Verb]:
        """Return the verbs that can change a task of this status."""
        return [verb for verb in VERBS.values() if verb.button and row.status in verb.statuses]

    def context_of(self, request: HttpRequest, row: Any) -> dict[str, Any]:
        """Return the links that the user may follow, and the reason why the task waits."""
        has_stack = row.status == TaskStatus.RUNNING and self.has_stack_permission(request)
        parts, steps = page.parts_of(row), page.latest_steps(row)
        children = page.children_of(steps)
        return {
            "pglock_again": self.address("again", row.pk) if self.has_again_permission(request) else "",
            "pglock_stack": self.address("stack", row.pk) if has_stack else "",
            "pglock_tick": page.tick_of(row),
            "pglock_schedule": page.schedule_of(row),
            "pglock_state": page.sentence(row),
            "pglock_failure": page.last_failure(row) if row.attempts or row.finished_at else None,
            "attempts": page.latest_attempts(row),
            "pglock_steps": steps,
            "pglock_again_from": self.address("again_from", row.pk) if self._may_run_again(request, row) else "",
            "pglock_before": parts[: page.FEW],
            "pglock_children": children[: page.FEW],
            "pglock_batch": page.batch_of(children or parts),
            "pglock_after": page.waiting_for(row),
            # A waiting task is not an error. But it is an error if no worker knows its function.
            "pglock_note" if row.status in ("BLOCKED", "SCHEDULED") else "pglock_warning": why_it_waits(
                row, Task.objects.db
            ),
        }

    def _may_run_again(self, request: HttpRequest, row: Any) -> bool:
        unchanging = (TaskStatus.RUNNING, TaskStatus.SUCCESSFUL)
        return row.status not in unchanging and row.waits_for == 0 and self.has_retry_permission(request)

    # Verbs and pages below

    def get_urls(self) -> list[URLPattern]:
        """Add the URLs of the buttons and of the pages below the list and the page of a task."""
        both = ("GET", "HEAD", "POST")
        return [
            self.own_path("export/", "export", partial(export_view, self), "POST"),
            self.own_path("enqueue/", "enqueue", partial(enqueue_page, self), *both),
            self.own_path("<int:task_id>/again/", "again", partial(enqueue_page, self), *both),
            self.own_path("<int:task_id>/steps/again/", "again_from", partial(page.again_from_view, self), "POST"),
            self.own_path("<int:task_id>/stack/", "stack", partial(page.stack_page, self), *both),
            self.own_path("<int:task_id>/attempts/<int:number>/", "attempt", partial(page.traceback_page, self)),
            *super().get_urls(),
        ]
