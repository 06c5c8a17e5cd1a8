"""The admin pages of tasks: columns, fields, actions, buttons and permissions."""

from __future__ import annotations

from typing import Any, ClassVar

from django.contrib import admin
from django.contrib.admin.views.main import ERROR_FLAG
from django.contrib.messages import WARNING
from django.core.exceptions import PermissionDenied
from django.db import router
from django.http import (
    Http404,
    HttpRequest,
    HttpResponse,
    HttpResponseBase,
    HttpResponseNotAllowed,
    HttpResponseRedirect,
)
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from django_pglock.admin import attempts, task_page, task_summary
from django_pglock.admin.actions import admin_action, perform
from django_pglock.admin.attempts import stack_page
from django_pglock.admin.enqueue import again_page, enqueue_page
from django_pglock.admin.export import export_view
from django_pglock.admin.pages import ReadOnlyAdmin, filled_fieldsets
from django_pglock.admin.task_list import (
    FILTERS,
    IndexedList,
    StatusFilter,
    attempts_made,
    find,
    last_failure,
    name_and_id,
    queue_name,
    status_mark,
    wait_or_run_time,
)
from django_pglock.models import Attempt, Task, Waiter
from django_pglock.store.prune import delete
from django_pglock.tasks.states import FINISHED, TaskStatus
from django_pglock.verbs import TASK_VERBS
from django_pglock.why_it_waits import why_it_waits

#: The URL names of pages that do not show arguments, or that load them by themselves.
_WITHOUT_ARGUMENTS = {
    *("django_pglock_task_changelist", "django_pglock_task_attempts", "django_pglock_task_attempt", "autocomplete"),
    *("django_pglock_task_stack", "django_pglock_task_export"),
}


class _NotDeleted(PermissionDenied):
    """The task is not finished, or is still needed."""


class TaskAdmin(ReadOnlyAdmin):
    """The list of tasks and the page of one task, with the verbs of tasks as actions and buttons."""

    # Django accepts functions here; django-stubs does not.
    list_display: Any = [
        name_and_id,
        status_mark,
        queue_name,
        last_failure,
        "priority",
        attempts_made,
        wait_or_run_time,
        "enqueued_at",
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
    actions = [admin_action(verb) for verb in TASK_VERBS.values()]
    inlines = [attempts.AttemptInline]
    change_list_template = "admin/django_pglock/task/change_list.html"
    change_form_template = "admin/django_pglock/task/change_form.html"
    fieldsets: ClassVar[Any] = [
        (
            None,
            {
                "fields": [
                    *(task_page.shown_task_path, status_mark, task_page.shown_queue, "priority", "backend"),
                    task_page.shown_worker,
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
        (
            _("Keys"),
            {
                "fields": [
                    *(task_page.shown_lock_key, "concurrency", task_page.shown_group_key, task_page.shown_fair_key),
                    *(task_page.shown_unique_key, "unique_until"),
                ]
            },
        ),
        (
            _("Attempts"),
            {"fields": [attempts_made, "retries", "max_retries", "rescues", "shown_attempts", task_page.shown_log]},
        ),
        (
            _("Times"),
            {
                "fields": [
                    *map(task_page.moment, ("enqueued_at", "run_after", "started_at", "last_attempted_at")),
                    *map(task_page.moment, ("cancel_requested_at", "finished_at", "expires_at")),
                ]
            },
        ),
    ]

    # The list

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[IndexedList]:
        """Return our change list."""
        return IndexedList

    def get_queryset(self, request: HttpRequest) -> Any:
        """Do not load the columns that a list does not show: arguments may have megabytes."""
        rows = super().get_queryset(request)
        is_shown = _page_of(request) not in _WITHOUT_ARGUMENTS
        return rows if is_shown else rows.defer("args", "kwargs", "result", "meta", "log", "progress", "stack")

    def get_search_results(self, request: HttpRequest, queryset: Any, search_term: str) -> tuple[Any, bool]:
        """Search by id, by the name of the function, or by the beginning of its path."""
        term = search_term.strip()
        # IndexedList limits the search of the list page.
        return (find(queryset, term, newest_only=_is_choice(request)) if term else queryset), False

    # The page of one task

    @admin.display(description=_("failed and lost attempts"))
    def shown_attempts(self, task: Task) -> str:
        """Return a link to the list of all failed and lost attempts. The page itself shows the latest."""
        return format_html('<a href="{}">{}</a>', self._address("attempts", task.pk), gettext("Show all"))

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[Any]:
        """Return all fields: none is editable."""
        return [field for _title, options in self.fieldsets for field in options["fields"]]

    def context_of(self, request: HttpRequest, obj: Any) -> dict[str, Any]:
        """Return the buttons that the user may press, and the reason why the task waits."""
        verbs = [
            {"label": verb.button, "url": self._address("verb", obj.pk, verb.name)}
            for verb in TASK_VERBS.values()
            if verb.button and obj.status in verb.statuses and self._may(request, verb.permission)
        ]
        before, after = task_summary.before_and_after(obj)
        waits = why_it_waits(obj, Task.objects.db)
        return {
            "pglock_verbs": verbs,
            "pglock_again": self._address("again", obj.pk) if self.has_again_permission(request) else "",
            "pglock_stack": self.address_of_stack(obj.pk) if self._has_stack(request, obj) else "",
            "pglock_tick": task_summary.tick_of(obj),
            "pglock_state": task_summary.sentence(obj),
            "pglock_failure": task_summary.last_failure(obj) if obj.attempts or obj.finished_at else None,
            "pglock_before": before,
            "pglock_after": after,
            # A waiting task is not an error. But it is an error if no worker knows its function.
            "pglock_note" if obj.status == "BLOCKED" else "pglock_warning": waits,
        }

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        """Leave out the fields that are empty."""
        return filled_fieldsets(self.fieldsets, obj)

    def get_inlines(self, request: HttpRequest, obj: Any) -> list[Any]:
        """Leave out the attempts of a task that has never been started."""
        return list(self.inlines) if obj is not None and obj.attempts else []

    # Verbs

    def get_urls(self) -> list[URLPattern]:
        """Add the URLs of the buttons and of the attempts."""
        site = self.admin_site
        own = (
            ("do/<str:verb>/", self.verb_view, "verb"),
            ("again/", self.again_view, "again"),
            ("stack/", self.stack_view, "stack"),
            ("attempts/", self.attempts_view, "attempts"),
            ("attempts/<int:number>/", self.attempt_view, "attempt"),
        )
        urls = [
            path(f"<int:task_id>/{route}", site.admin_view(view), name=f"django_pglock_task_{name}")
            for route, view, name in own
        ]
        export = path("export/<str:form>/", site.admin_view(self.export_view), name="django_pglock_task_export")
        enqueue = path("enqueue/", site.admin_view(self.enqueue_view), name="django_pglock_task_enqueue")
        return [export, enqueue, *urls, *super().get_urls()]

    def enqueue_view(self, request: HttpRequest) -> HttpResponse:
        """Enqueue a task by form."""
        return enqueue_page(self, request)

    def again_view(self, request: HttpRequest, task_id: int) -> HttpResponse:
        """Enqueue the function of a task with other arguments."""
        return again_page(self, request, task_id)

    def export_view(self, request: HttpRequest, form: str) -> HttpResponseBase:
        """Send the tasks of the filtered list as a file."""
        return export_view(self, request, form)

    def stack_view(self, request: HttpRequest, task_id: int) -> HttpResponse:
        """Ask for the stack of a running task, or show it."""
        return stack_page(self, request, task_id)

    def attempts_view(self, request: HttpRequest, task_id: int) -> HttpResponse:
        """Show the list of failed and lost attempts."""
        return attempts.list_page(self, request, task_id)

    def attempt_view(self, request: HttpRequest, task_id: int, number: int) -> HttpResponse:
        """Show the traceback of one attempt."""
        return attempts.traceback_page(self, request, task_id, number)

    def verb_view(self, request: HttpRequest, task_id: int, verb: str) -> HttpResponse:
        """Apply the verb of a button: only by POST, with CSRF protection, and with the permission of the verb."""
        if request.method != "POST":
            return HttpResponseNotAllowed(["POST"])
        has_button = verb in TASK_VERBS and TASK_VERBS[verb].button
        if not has_button or not self._may(request, TASK_VERBS[verb].permission):
            raise PermissionDenied
        # A user may act only on rows that the admin shows to that user.
        task = self.get_object(request, str(task_id))
        if not self.has_view_permission(request, task):
            raise PermissionDenied
        if task is None:
            raise Http404
        perform(TASK_VERBS[verb], request, self.get_queryset(request).filter(pk=task.pk))
        return HttpResponseRedirect(self._address("change", task.pk))

    def address_of_list(self) -> str:
        """Return the address of the list."""
        return self._address("changelist")

    def address_of(self, task_id: Any) -> str:
        """Return the address of the page of a task."""
        return self._address("change", task_id)

    def address_of_stack(self, task_id: Any) -> str:
        """Return the address of the page with the stack of a task."""
        return self._address("stack", task_id)

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        """Add whether the user may export and enqueue. Say so if Django has dropped the filters."""
        if ERROR_FLAG in request.GET:
            self.message_user(request, gettext("A filter could not be read, so the list is not filtered."), WARNING)
        may = {"export": self.has_export_permission(request), "enqueue": self.has_enqueue_permission(request)}
        return super().changelist_view(request, {"pglock_may": may, **(extra_context or {})})

    def _address(self, page: str, *arguments: Any) -> str:
        return reverse(f"admin:django_pglock_task_{page}", args=arguments, current_app=self.admin_site.name)

    def has_retry_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may retry tasks and run them now."""
        return self._may(request, "retry")

    def has_cancel_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may cancel tasks."""
        return self._may(request, "cancel")

    def has_reset_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may reset stuck tasks."""
        return self._may(request, "reset")

    def has_export_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may export tasks."""
        return self._may(request, "export")

    def has_stack_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may see the stacks of running tasks."""
        return self._may(request, "stack")

    def _has_stack(self, request: HttpRequest, task: Any) -> bool:
        return task.status == TaskStatus.RUNNING and self.has_stack_permission(request)

    def has_enqueue_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may enqueue tasks by form: the permission to add tasks."""
        return self._may(request, "add")

    def has_again_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may run a task again with other arguments: the permission to change tasks."""
        return self._may(request, "change")

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return whether the user may delete tasks, or this task: only if it is finished."""
        return (obj is None or obj.status in FINISHED) and self._may(request, "delete")

    def has_move_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may move tasks to another queue: the permission to change tasks."""
        return self._may(request, "change")

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
            verb = TASK_VERBS["delete_finished"]
            self.message_user(request, verb.message(verb.unchanged, 1), WARNING)
            return HttpResponseRedirect(self._address("change", object_id))

    def delete_model(self, request: HttpRequest, obj: Any) -> None:
        """Delete the task by the verb of the package, which deletes no task that is still needed."""
        if not delete(Task.objects.using(router.db_for_write(Task)).filter(pk=obj.pk)):
            raise _NotDeleted

    @staticmethod
    def _may(request: HttpRequest, verb: str) -> bool:
        return request.user.has_perm(f"django_pglock.{verb}_task")


def _page_of(request: HttpRequest) -> str:
    """Return the URL name of the page, without its namespace."""
    return str(request.resolver_match.url_name) if request.resolver_match is not None else ""


def _is_choice(request: HttpRequest) -> bool:
    """Return whether a form asks for the choices of ``autocomplete_fields``."""
    return _page_of(request) == "autocomplete"
