"""The admin of tasks: the columns of the list, the fields of the page, actions, buttons and permissions."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from django.contrib.admin.views.main import ERROR_FLAG
from django.contrib.messages import WARNING
from django.core.exceptions import PermissionDenied
from django.db import router
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import URLPattern
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from django_pglock.admin import task_page as page
from django_pglock.admin.actions import admin_action, perform
from django_pglock.admin.enqueue import again_page, enqueue_page
from django_pglock.admin.pages import ReadOnlyAdmin, needs
from django_pglock.admin.task_list import (
    FILTERS,
    IndexedList,
    StatusFilter,
    attempts_made,
    export_view,
    find,
    last_failure,
    name_and_id,
    queue_name,
    status_mark,
    wait_or_run_time,
)
from django_pglock.models import Attempt, Task, Waiter
from django_pglock.store.operate import DELETE, VERBS
from django_pglock.store.why_it_waits import why_it_waits
from django_pglock.tasks.states import FINISHED, TaskStatus

#: The pages that do not show arguments, or that load them by themselves.
_WITHOUT_ARGUMENTS = ("changelist", "attempts", "attempt", "stack", "export")


class _NotDeleted(PermissionDenied):
    """The task is not finished, or is still needed."""


class TaskAdmin(ReadOnlyAdmin):
    """The list of tasks and the page of one task, with the verbs of tasks as actions and buttons."""

    # Django accepts functions here; django-stubs does not.
    list_display: Any = [
        *(name_and_id, status_mark, queue_name, last_failure, "priority", attempts_made),
        *(wait_or_run_time, "enqueued_at"),
    ]
    list_filter = [("status", StatusFilter), *FILTERS]
    #: The link "Older tasks", and the links from groups of failures.
    linked_lookups = ("id__lt", "fingerprint__exact")
    search_fields = ["task_path"]
    search_help_text = _("The id of a task, the name of its function, or the beginning of the path of its function.")
    ordering = ["-id"]
    # For each failed task of a page some pages of the database are read: its row and its last attempt.
    list_per_page = 30
    sortable_by: ClassVar[Any] = [name_and_id]
    actions = [admin_action(verb) for verb in VERBS.values()]
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
                *(page.lock_key, "concurrency", page.as_text("group_key"), page.as_text("fair_key")),
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
    #: To enqueue any function is to add a task. To move tasks, or to run one again, is to change tasks.
    has_enqueue_permission = needs("add_task")
    has_again_permission = has_move_permission = needs("change_task")

    # The list

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[IndexedList]:
        """Return our change list."""
        return IndexedList

    def get_queryset(self, request: HttpRequest) -> Any:
        """Do not load the columns that a list does not show: arguments may have megabytes."""
        rows = super().get_queryset(request)
        name = _page_of(request)
        is_shown = name != "autocomplete" and name.removeprefix("django_pglock_task_") not in _WITHOUT_ARGUMENTS
        return rows if is_shown else rows.defer("args", "kwargs", "result", "meta", "log", "progress", "stack")

    def get_search_results(self, request: HttpRequest, queryset: Any, search_term: str) -> tuple[Any, bool]:
        """Search by id, by the name of the function, or by the beginning of its path."""
        term = search_term.strip()
        # IndexedList limits the search of the list. A form may ask for the choices of ``autocomplete_fields``, too.
        is_choice = _page_of(request) == "autocomplete"
        return (find(queryset, term, newest_only=is_choice) if term else queryset), False

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        """Add whether the user may export and enqueue. Say so if Django has dropped the filters."""
        if ERROR_FLAG in request.GET:
            self.message_user(request, gettext("A filter could not be read, so the list is not filtered."), WARNING)
        may = {"export": self.has_export_permission(request), "enqueue": self.has_enqueue_permission(request)}
        return super().changelist_view(request, {"pglock_may": may, **(extra_context or {})})

    # The page of one task

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[Any]:
        """Return all fields: none is editable."""
        return [field for _title, fields in self.sections for field in fields]

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        """Leave out the fields that are empty."""
        return page.filled(self.sections, obj)

    def context_of(self, request: HttpRequest, obj: Any) -> dict[str, Any]:
        """Return the buttons that the user may press, and the reason why the task waits."""
        verbs = [
            {"label": verb.button, "url": self.address("verb", obj.pk, verb.name)}
            for verb in VERBS.values()
            if verb.button and obj.status in verb.statuses and self._may(request, verb)
        ]
        has_stack = obj.status == TaskStatus.RUNNING and self.has_stack_permission(request)
        before, after = page.before_and_after(obj)
        return {
            "pglock_verbs": verbs,
            "pglock_again": self.address("again", obj.pk) if self.has_again_permission(request) else "",
            "pglock_stack": self.address("stack", obj.pk) if has_stack else "",
            "pglock_tick": page.tick_of(obj),
            "pglock_state": page.sentence(obj),
            "pglock_failure": page.last_failure(obj) if obj.attempts or obj.finished_at else None,
            "attempts": page.latest_attempts(obj),
            "pglock_before": before,
            "pglock_after": after,
            # A waiting task is not an error. But it is an error if no worker knows its function.
            "pglock_note" if obj.status == "BLOCKED" else "pglock_warning": why_it_waits(obj, Task.objects.db),
        }

    # Verbs and pages below

    def get_urls(self) -> list[URLPattern]:
        """Add the URLs of the buttons and of the pages below the list and the page of a task."""
        both = ("GET", "HEAD", "POST")
        return [
            self.own_path("export/<str:form>/", "export", partial(export_view, self), "POST"),
            self.own_path("enqueue/", "enqueue", partial(enqueue_page, self), *both),
            self.own_path("<int:task_id>/do/<str:verb>/", "verb", self.verb_view, "POST"),
            self.own_path("<int:task_id>/again/", "again", partial(again_page, self), *both),
            self.own_path("<int:task_id>/stack/", "stack", partial(page.stack_page, self), *both),
            self.own_path("<int:task_id>/attempts/", "attempts", partial(page.list_page, self)),
            self.own_path("<int:task_id>/attempts/<int:number>/", "attempt", partial(page.traceback_page, self)),
            *super().get_urls(),
        ]

    def verb_view(self, request: HttpRequest, task_id: int, verb: str) -> HttpResponse:
        """Apply the verb of a button: only by POST, with CSRF protection, and with the permission of the verb."""
        asked = VERBS.get(verb)
        if asked is None or not asked.button or not self._may(request, asked):
            raise PermissionDenied
        # A user may act only on rows that the admin shows to that user.
        task = self.seen(request, str(task_id))
        perform(asked, request, self.get_queryset(request).filter(pk=task.pk))
        return HttpResponseRedirect(self.address("change", task.pk))

    def _may(self, request: HttpRequest, verb: Any) -> bool:
        return bool(request.user.has_perm(f"django_pglock.{verb.permission}_task"))

    # Deletion

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return whether the user may delete tasks, or this task: only if it is finished."""
        return (obj is None or obj.status in FINISHED) and needs("delete_task")(self, request)

    def get_actions(self, request: HttpRequest, action_location: Any = None) -> Any:
        """Leave out Django's action that deletes: it loads all rows, and deletes tasks that are still needed."""
        # Django before 6.1 knows no location.
        options = {} if action_location is None else {"action_location": action_location}
        actions = super().get_actions(request, **options)
        return {name: about for name, about in actions.items() if name != "delete_selected"}

    def get_deleted_objects(self, objs: Any, request: HttpRequest) -> Any:
        """Count the rows that are deleted with the tasks. Django would load and list them, with all tracebacks."""
        related = {each.related_model for each in self.opts.get_fields(include_hidden=True) if each.auto_created}
        if not related <= {Attempt, Waiter}:
            # Models of the project refer to tasks: only Django's own method checks the permissions for those.
            return super().get_deleted_objects(objs, request)
        database, keys = router.db_for_write(Task), [task.pk for task in objs]
        counts = {str(self.opts.verbose_name_plural): len(keys)}
        for rows in (Attempt.objects.using(database), Waiter.objects.using(database)):
            if count := rows.filter(task__in=keys).count():
                counts[str(rows.model._meta.verbose_name_plural)] = count
        refused = {str(self.opts.verbose_name) for task in objs if not self.has_delete_permission(request, task)}
        return [str(task) for task in objs], counts, refused, []

    def delete_view(self, request: HttpRequest, object_id: str, extra_context: Any = None) -> Any:
        """Ask for confirmation and delete the task. Say so if it is still needed, or was retried meanwhile."""
        try:
            return super().delete_view(request, object_id, extra_context)
        except _NotDeleted:
            # Django has rolled back, also the entry in the admin log.
            self.message_user(request, DELETE.message(DELETE.unchanged, 1), WARNING)
            return HttpResponseRedirect(self.address("change", object_id))

    def delete_model(self, request: HttpRequest, obj: Any) -> None:
        """Delete the task by the verb of the package, which deletes no task that is still needed."""
        if not DELETE.apply(Task.objects.using(router.db_for_write(Task)).filter(pk=obj.pk)):
            raise _NotDeleted


def _page_of(request: HttpRequest) -> str:
    """Return the URL name of the page, without its namespace."""
    return str(request.resolver_match.url_name) if request.resolver_match is not None else ""
