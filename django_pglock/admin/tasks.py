"""The pages of tasks, built for ten million rows: every query of them walks an index or stops early."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.db import router
from django.db.models import Q
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseNotAllowed, HttpResponseRedirect
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from django_pglock.admin import attempts
from django_pglock.admin.actions import VERBS, admin_action, perform
from django_pglock.admin.pages import AtLeast, CappedChangeList, ReadOnlyAdmin, elapsed
from django_pglock.admin.task_filters import QueueFilter, StatusFilter, StuckFilter, TaskPathFilter, status_of
from django_pglock.models import Attempt, Task, Waiter, Worker
from django_pglock.store.count import in_status, search_end
from django_pglock.store.lock_keys import holders
from django_pglock.tasks import registry
from django_pglock.tasks.redaction import shown
from django_pglock.tasks.states import FINISHED, TaskStatus

#: Pages that show no arguments.
_WITHOUT_ARGUMENTS = {
    *("django_pglock_task_changelist", "django_pglock_task_attempts", "django_pglock_task_attempt", "autocomplete"),
}
#: How many others are named of those that a task waits for.
FEW = 5


class TaskChangeList(CappedChangeList):
    """Walks the index that has what was asked for, and looks through so many tasks only where there is none."""

    #: Where the search among the newest ended, if there are more behind.
    search_end: int | None = None

    def get_results(self, request: HttpRequest) -> None:
        """Look for a queue or a function among the newest; actions on all that match are not limited by it."""
        asked = request.GET
        is_search = asked.get("queue") or asked.get("task_path") or (self.query and not self.query.strip().isdigit())
        if is_search and not asked.get("attention"):
            self.search_end = search_end(self._searched(request))
        if self.search_end is not None:
            self.queryset = self.queryset.filter(pk__gt=self.search_end)
        super().get_results(request)
        if self.search_end is not None:
            self.result_count = AtLeast(self.result_count)

    def _searched(self, request: HttpRequest) -> Any:
        status, below = status_of(request), request.GET.get("id__lt")
        rows = Task.objects.using(self.root_queryset.db)
        rows = in_status(rows, status).order_by("-status", "-pk") if status else rows.order_by("-pk")
        return rows.filter(pk__lt=below) if below else rows

    @property
    def older_query(self) -> str:
        """The query string of the rows behind the last one shown, or behind those that were looked through."""
        query = super().older_query
        if query or self.search_end is None:
            return query
        return self.get_query_string({"id__lt": self.search_end + 1}, remove=["p"])

    def get_ordering(self, request: HttpRequest, queryset: Any) -> list[Any]:
        """Sort by id; within a status by the index of statuses, which is by id, too."""
        ordering: list[Any] = super().get_ordering(request, queryset)
        direction = "-" if ordering[0].startswith("-") else ""
        return [f"{direction}status", *ordering] if status_of(request) else ordering


class TaskAdmin(ReadOnlyAdmin):
    """Tasks: what waits, runs, failed; and what may be asked of them."""

    list_display = ["name_and_id", "status_mark", "queue", "priority", "attempts_made", "waits_or_took", "enqueued_at"]
    list_filter = [("status", StatusFilter), StuckFilter, QueueFilter, TaskPathFilter]
    #: "Older than these".
    linked_lookups = ("id__lt",)
    search_fields = ["task_path"]
    search_help_text = _("The id of a task, or the beginning of the path of its function.")
    ordering = ["-id"]
    sortable_by = ["name_and_id"]
    actions = [admin_action(verb) for verb in VERBS.values()]
    inlines = [attempts.AttemptInline]
    change_list_template = "admin/django_pglock/task/change_list.html"
    change_form_template = "admin/django_pglock/task/change_form.html"
    fieldsets = [
        (None, {"fields": ["task_path", "status_mark", "queue", "priority", "backend"]}),
        (_("Call"), {"fields": ["shown_args", "shown_kwargs", "shown_progress", "shown_result", "shown_meta"]}),
        (
            _("Keys"),
            {"fields": ["shown_lock_key", "concurrency", "shown_fair_key", "shown_unique_key", "unique_until"]},
        ),
        (_("Attempts"), {"fields": ["attempts_made", "retries", "max_retries", "rescues", "worker", "shown_attempts"]}),
        (
            _("Times"),
            {
                "fields": [
                    *("enqueued_at", "run_after", "started_at"),
                    *("last_attempted_at", "cancel_requested_at", "finished_at", "expires_at"),
                ]
            },
        ),
    ]

    # The list

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[TaskChangeList]:
        """Return our change list."""
        return TaskChangeList

    def get_queryset(self, request: HttpRequest) -> Any:
        """Leave out what a list does not show: arguments may be megabytes each."""
        rows = super().get_queryset(request)
        is_shown = _page_of(request) not in _WITHOUT_ARGUMENTS
        return rows if is_shown else rows.defer("args", "kwargs", "result", "meta")

    def get_search_results(self, request: HttpRequest, queryset: Any, search_term: str) -> tuple[Any, bool]:
        """Find by id or by the beginning of the function's path; never by reading every row's JSON."""
        term = search_term.strip()
        if not term:
            return queryset, False
        if term.isascii() and term.isdigit():
            return (queryset.filter(pk=int(term)) if int(term) < 2**63 else queryset.none()), False
        # The paths are few and known, so the planner gets equality instead of a pattern.
        paths = [path for path in registry.known_paths() if path.startswith(term) or path.endswith(f".{term}")]
        found = queryset.filter(task_path__in=[term.replace("\x00", ""), *paths])
        if _is_choice(request) and (end := search_end(self.model.objects.using(queryset.db).order_by("-pk"))):
            # As in the list, which sets its limit itself: no index knows functions.
            found = found.filter(pk__gt=end)
        return found, False

    @admin.display(description=_("task"), ordering="-id")
    def name_and_id(self, task: Task) -> str:
        """Return the function's name and the task's id."""
        return format_html(
            '<span title="{}">{}</span> <span class="pglock-id">#{}</span>', task.task_path, task.name, task.pk
        )

    @admin.display(description=_("status"))
    def status_mark(self, task: Task) -> str:
        """Return the status in its colour, and whether somebody has asked for the end."""
        is_asked = task.status == "RUNNING" and task.cancel_requested_at is not None
        return format_html(
            '<span class="pglock-status pglock-{}">{}</span>{}',
            task.status.lower(),
            task.get_status_display(),
            f" ({gettext('cancel requested')})" if is_asked else "",
        )

    @admin.display(description=_("waits or took"))
    def waits_or_took(self, task: Task) -> str:
        """Return how long the task has waited or run, or how long it took."""
        if task.finished_at:
            if not task.started_at:
                return "-"
            took = (task.finished_at - task.started_at).total_seconds()
            return gettext("%(seconds).3f s") % {"seconds": took}
        return elapsed((task.status == "RUNNING" and task.last_attempted_at) or task.enqueued_at)

    # The page of one task

    @admin.display(description=_("arguments"))
    def shown_args(self, task: Task) -> str:
        """Return the positional arguments."""
        return _as_json(shown(task, "args"))

    @admin.display(description=_("keyword arguments"))
    def shown_kwargs(self, task: Task) -> str:
        """Return the keyword arguments."""
        return _as_json(shown(task, "kwargs"))

    @admin.display(description=_("lock key"), empty_value="-")
    def shown_lock_key(self, task: Task) -> str | None:
        """Return the key that one task at a time has."""
        return _text_of(task, "lock_key")

    @admin.display(description=_("fair key"), empty_value="-")
    def shown_fair_key(self, task: Task) -> str | None:
        """Return the key that takes turns with others."""
        return _text_of(task, "fair_key")

    @admin.display(description=_("unique key"), empty_value="-")
    def shown_unique_key(self, task: Task) -> str | None:
        """Return the key of which there is one."""
        return _text_of(task, "unique_key")

    @admin.display(description=_("progress"))
    def shown_progress(self, task: Task) -> str:
        """Return how far it is, as it has told."""
        return _as_json(task.progress)

    @admin.display(description=_("result"))
    def shown_result(self, task: Task) -> str:
        """Return what the function returned."""
        return _as_json(shown(task, "result"))

    @admin.display(description=_("carried along"))
    def shown_meta(self, task: Task) -> str:
        """Return what travels with the task."""
        return _as_json(shown(task, "meta"))

    @admin.display(description=_("attempts"))
    def attempts_made(self, task: Task) -> int:
        """Return how often the function was begun."""
        return task.attempts_made

    @admin.display(description=_("failed and lost"))
    def shown_attempts(self, task: Task) -> str:
        """Return a link to all attempts that did not succeed: the page itself has the last ones."""
        return format_html('<a href="{}">{}</a>', self._address("attempts", task.pk), gettext("List of all"))

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> list[str]:
        """Return all fields: nothing is edited."""
        return [str(field) for _title, options in self.fieldsets for field in options["fields"]]

    def context_of(self, request: HttpRequest, obj: Any) -> dict[str, Any]:
        """Return the buttons that this person may press, and why the task waits."""
        verbs = [
            {"label": verb.button, "url": self._address("verb", obj.pk, verb.name)}
            for verb in VERBS.values()
            if obj.status in verb.statuses and self._may(request, verb.permission)
        ]
        return {"pglock_verbs": verbs, "pglock_warning": _why_it_waits(obj)}

    # What may be asked

    def get_urls(self) -> list[URLPattern]:
        """Add the addresses of the buttons and of attempts."""
        site = self.admin_site
        own = (
            ("do/<str:verb>/", self.verb_view, "verb"),
            ("attempts/", self.attempts_view, "attempts"),
            ("attempts/<int:number>/", self.attempt_view, "attempt"),
        )
        urls = [
            path(f"<int:task_id>/{route}", site.admin_view(view), name=f"django_pglock_task_{name}")
            for route, view, name in own
        ]
        return [*urls, *super().get_urls()]

    def attempts_view(self, request: HttpRequest, task_id: int) -> HttpResponse:
        """Show a page of the attempts that did not succeed."""
        return attempts.list_page(self, request, task_id)

    def attempt_view(self, request: HttpRequest, task_id: int, number: int) -> HttpResponse:
        """Show the traceback of one attempt."""
        return attempts.traceback_page(self, request, task_id, number)

    def verb_view(self, request: HttpRequest, task_id: int, verb: str) -> HttpResponse:
        """Do what a button asks. Only by POST, with CSRF protection, and with the verb's own permission."""
        if request.method != "POST":
            return HttpResponseNotAllowed(["POST"])
        if verb not in VERBS or not self._may(request, VERBS[verb].permission):
            raise PermissionDenied
        # What this person does not see, this person does not touch: the same rows as on the pages.
        task = self.get_object(request, str(task_id))
        if not self.has_view_permission(request, task):
            raise PermissionDenied
        if task is None:
            raise Http404
        perform(VERBS[verb], request, self.get_queryset(request).filter(pk=task.pk))
        return HttpResponseRedirect(self._address("change", task.pk))

    def _address(self, page: str, *arguments: Any) -> str:
        return reverse(f"admin:django_pglock_task_{page}", args=arguments, current_app=self.admin_site.name)

    def has_retry_permission(self, request: HttpRequest) -> bool:
        """May retry and run now."""
        return self._may(request, "retry")

    def has_cancel_permission(self, request: HttpRequest) -> bool:
        """May cancel."""
        return self._may(request, "cancel")

    def has_reset_permission(self, request: HttpRequest) -> bool:
        """May reset what is stuck."""
        return self._may(request, "reset")

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """May delete one finished task. The list has no such action: pruning is not done by hand."""
        is_deletable = obj is not None and obj.status in FINISHED
        return is_deletable and request.user.has_perm("django_pglock.delete_task")

    def get_deleted_objects(self, objs: Any, request: HttpRequest) -> Any:
        """Count the rows that go with the tasks. Django would load and list them, with a thousand tracebacks."""
        related = {each.related_model for each in self.opts.get_fields(include_hidden=True) if each.auto_created}
        if not related <= {Attempt, Waiter}:
            # Only Django's own way knows what to ask about the models of a project.
            return super().get_deleted_objects(objs, request)
        database, keys = router.db_for_write(Task), [task.pk for task in objs]
        counts = {str(self.opts.verbose_name_plural): len(keys)}
        for rows in (Attempt.objects.using(database), Waiter.objects.using(database)):
            if count := rows.filter(task__in=keys).count():
                counts[str(rows.model._meta.verbose_name_plural)] = count
        refused = {str(self.opts.verbose_name) for task in objs if not self.has_delete_permission(request, task)}
        return [str(task) for task in objs], counts, refused, []

    def delete_model(self, request: HttpRequest, obj: Any) -> None:
        """Delete the task, unless somebody has started it again since the question was asked."""
        rows = Task.objects.using(router.db_for_write(Task)).select_for_update()
        if not rows.filter(pk=obj.pk, status__in=FINISHED).exists():
            raise PermissionDenied
        super().delete_model(request, obj)

    @staticmethod
    def _may(request: HttpRequest, verb: str) -> bool:
        return request.user.has_perm(f"django_pglock.{verb}_task")


def _page_of(request: HttpRequest) -> str:
    """Return the name of the page of the admin, without its namespace."""
    return str(request.resolver_match.url_name) if request.resolver_match is not None else ""


def _is_choice(request: HttpRequest) -> bool:
    """Say whether a form asks for tasks to choose from, by ``autocomplete_fields``."""
    return _page_of(request) == "autocomplete"


def _why_it_waits(task: Task) -> str:
    """Return what a task waits for, other than its turn; of one that does not wait, nothing."""
    if task.status == TaskStatus.READY:
        return _why_nobody_runs(task)
    if task.status != TaskStatus.BLOCKED:
        return ""
    if task.waits_for:
        awaited = task.awaiting.values_list("awaited", flat=True)[:FEW]
        return gettext("It waits for the end of %(tasks)s.") % {"tasks": _numbers(awaited)}
    ids = holders(Task.objects.db, str(task.lock_key), limit=FEW)
    return gettext("It waits for its key, %(key)s, which is with %(tasks)s.") % {
        "key": shown(task, "lock_key"),
        "tasks": _numbers(ids) or gettext("nobody at this moment"),
    }


def _numbers(ids: Iterable[int]) -> str:
    return ", ".join(f"#{each}" for each in ids)


def _why_nobody_runs(task: Task) -> str:
    """Return what is to be said of a ready task that no worker can run; of all others, nothing."""
    alive = Worker.objects.all().alive()
    known = list(alive.annotate(knows=Q(task_paths__contains=[task.task_path])).values_list("knows", flat=True))
    if not known:
        return gettext("No worker knows this task: none is running.")
    if not any(known):
        return gettext("No worker knows this task. Is its module imported, or its deploy still to come?")
    return ""


def _text_of(task: Task, field: str) -> str | None:
    value = shown(task, field)
    return None if value is None else str(value)


def _as_json(value: Any) -> str:
    text = json.dumps(value, indent=2, ensure_ascii=False)
    return format_html('<pre class="pglock-json">{}</pre>', text[:10_000] + ("…" if len(text) > 10_000 else ""))
