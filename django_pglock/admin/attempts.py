"""The failed and lost attempts of a task: the latest on the task's page, all in a list, each traceback on its own page.

A task may fail a thousand times, and a traceback has up to 60,000 characters. So no list loads tracebacks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin, messages
from django.core.exceptions import BadRequest, PermissionDenied
from django.db import router, transaction
from django.forms.models import BaseInlineFormSet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseNotAllowed, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.html import format_html
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from django_pglock.admin.actions import record
from django_pglock.models import Attempt, Task
from django_pglock.store.id_range import id_in
from django_pglock.store.requests_to_worker import request_stack, wait_for_stack

if TYPE_CHECKING:
    AnyInline = admin.TabularInline[Attempt, Task]
    AnyFormSet = BaseInlineFormSet[Attempt, Task, Any]
else:
    AnyInline = admin.TabularInline
    AnyFormSet = BaseInlineFormSet

#: The number of attempts on the page of a task, and on one page of the list of all its attempts.
SHOWN_ATTEMPTS = 20
PER_PAGE = 100


class LastAttempts(AnyFormSet):
    """Takes the latest attempts. Django filters the queryset by task, which a sliced queryset does not allow."""

    def get_queryset(self) -> Any:
        """Return the attempts to show. Django calls this for each row, so the queryset is kept."""
        if not hasattr(self, "_queryset"):
            self._queryset = newest_first(super().get_queryset())[:SHOWN_ATTEMPTS]
        return self._queryset


class AttemptInline(AnyInline):
    """The latest failed and lost attempts, on the page of a task."""

    model = Attempt
    formset = LastAttempts
    verbose_name_plural = _("latest failed and lost attempts")
    fields = ("number", "outcome", "by", "started_at", "finished_at", "exception", "trace")
    readonly_fields = fields
    extra = 0
    can_delete = False

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return False: only workers write attempts."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return False: attempts cannot be edited."""
        return False

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return whether the user may view tasks: attempts have no permission of their own."""
        return request.user.has_perm("django_pglock.view_task")

    @admin.display(description=_("worker"))
    def by(self, attempt: Attempt) -> str:
        """Return the name of the worker, which is stored in the attempt, or its id."""
        return str(attempt.worker_name or attempt.worker or "-")

    @admin.display(description=_("exception"))
    def exception(self, attempt: Attempt) -> str:
        """Return the path of the exception's class. A long path is broken, so that the table fits the page."""
        return format_html('<span class="pglock-path">{}</span>', attempt.exception_path)

    @admin.display(description=_("traceback"))
    def trace(self, attempt: Attempt) -> str:
        """Return a link to the traceback."""
        site = self.admin_site.name
        url = reverse("admin:django_pglock_task_attempt", args=[attempt.task_id, attempt.number], current_app=site)
        return format_html('<a href="{}">{}</a>', url, gettext("Traceback"))


def list_page(model_admin: Any, request: HttpRequest, task_id: int) -> HttpResponse:
    """Show the attempts of a task, the newest first; with ``?before=N`` those with a number below N."""
    if request.method not in ("GET", "HEAD"):
        return HttpResponseNotAllowed(["GET", "HEAD"])
    before = id_in(request.GET.get("before", "1"))
    # PostgreSQL would raise an error for a number outside of the range of the column.
    if before is None or before >= 2**31:
        raise BadRequest("before must be the number of an attempt.")
    task = seen_task(model_admin, request, task_id)
    rows = newest_first(task.failures.all())
    if "before" in request.GET:
        rows = rows.filter(number__lt=before)
    found = list(rows[: PER_PAGE + 1])
    older = found[PER_PAGE - 1].number if len(found) > PER_PAGE else None
    context = {"title": gettext("Failed and lost attempts"), "attempts": found[:PER_PAGE], "older": older}
    return answer(model_admin, request, task, "attempts", context)


def traceback_page(model_admin: Any, request: HttpRequest, task_id: int, number: int) -> HttpResponse:
    """Show one attempt with its traceback."""
    if request.method not in ("GET", "HEAD"):
        return HttpResponseNotAllowed(["GET", "HEAD"])
    task = seen_task(model_admin, request, task_id)
    # The default ordering of the model would join the table of tasks.
    attempt = task.failures.filter(number=number).order_by("number").first()
    if attempt is None:
        raise Http404
    title = gettext("Attempt %(number)d") % {"number": number}
    return answer(model_admin, request, task, "attempt", {"title": title, "attempt": attempt})


def newest_first(rows: Any) -> Any:
    """Return the attempts in the order of the index on task and number, without their tracebacks."""
    return rows.order_by("-number").defer("traceback", "log")


def seen_task(model_admin: Any, request: HttpRequest, task_id: int) -> Task:
    """Return a task that the user may view. Raises ``PermissionDenied``, or ``Http404`` if there is no such task."""
    if not model_admin.has_view_permission(request):
        raise PermissionDenied
    task: Task | None = model_admin.get_object(request, str(task_id))
    if task is None:
        raise Http404
    if not model_admin.has_view_permission(request, task):
        raise PermissionDenied
    return task


def answer(model_admin: Any, request: HttpRequest, task: Task, name: str, context: dict[str, Any]) -> HttpResponse:
    """Return a page about a task, by the name of its template."""
    site = model_admin.admin_site
    request.current_app = site.name
    about = {"opts": model_admin.opts, "task": task, "subtitle": str(task), "media": model_admin.media}
    template = f"admin/django_pglock/task/{name}.html"
    return TemplateResponse(request, template, {**site.each_context(request), **about, **context})


#: Seconds for which a request waits for the answer of the worker. Most answers take milliseconds.
STACK_TIMEOUT = 2.0


def stack_page(model_admin: Any, request: HttpRequest, task_id: int) -> HttpResponse:
    """Request the stack of a running task (POST), or show the latest answer (GET)."""
    if request.method not in ("GET", "HEAD", "POST"):
        return HttpResponseNotAllowed(["GET", "HEAD", "POST"])
    if not model_admin.has_stack_permission(request):
        raise PermissionDenied
    task = seen_task(model_admin, request, task_id)
    using = router.db_for_write(Task)
    if request.method != "POST":
        found = wait_for_stack(using, task.pk, timeout=STACK_TIMEOUT)
        context = {"title": gettext("Stack"), "found": found, "is_running": task.status == "RUNNING"}
        return answer(model_admin, request, task, "stack", context)
    with transaction.atomic(using=using):
        if request_stack(using, task.pk):
            record(request, Task, "stack: asked for", object_id=str(task.pk))
            return HttpResponseRedirect(model_admin.address_of_stack(task.pk))
    messages.warning(request, gettext("The task does not run any more."))
    return HttpResponseRedirect(model_admin.address_of(task.pk))
