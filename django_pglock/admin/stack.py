"""The page with the stack of a running task: a button requests the stack, and the page shows the answer."""

from __future__ import annotations

from typing import Protocol

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.db import router, transaction
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed, HttpResponseRedirect
from django.utils.translation import gettext

from django_pglock.admin.actions import record
from django_pglock.admin.attempts import answer, seen_task
from django_pglock.models import Task
from django_pglock.store.running_stack import request_stack, wait_for_stack

#: Seconds for which a request waits for the answer of the worker. Most answers take milliseconds.
TIMEOUT = 2.0


class HasStackPage(Protocol):
    """The part of the admin of tasks that the page uses."""

    def has_stack_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may see the stacks of running tasks."""
        ...

    def address_of(self, task_id: int) -> str:
        """Return the address of the page of a task."""
        ...

    def address_of_stack(self, task_id: int) -> str:
        """Return the address of the page with the stack of a task."""
        ...


def stack_page(model_admin: HasStackPage, request: HttpRequest, task_id: int) -> HttpResponse:
    """Request the stack of a running task (POST), or show the latest answer (GET)."""
    if request.method not in ("GET", "HEAD", "POST"):
        return HttpResponseNotAllowed(["GET", "HEAD", "POST"])
    if not model_admin.has_stack_permission(request):
        raise PermissionDenied
    task = seen_task(model_admin, request, task_id)
    using = router.db_for_write(Task)
    if request.method == "POST":
        return HttpResponseRedirect(_request(model_admin, request, task, using))
    found = wait_for_stack(using, task.pk, timeout=TIMEOUT)
    context = {"title": gettext("Stack"), "found": found, "is_running": task.status == "RUNNING"}
    return answer(model_admin, request, task, "stack", context)


def _request(model_admin: HasStackPage, request: HttpRequest, task: Task, using: str) -> str:
    """Request the stack, and return the address of the page that shows the answer."""
    with transaction.atomic(using=using):
        is_requested = request_stack(using, task.pk)
        if is_requested:
            record(request, Task, "stack: asked for", object_id=str(task.pk))
    if is_requested:
        return model_admin.address_of_stack(task.pk)
    messages.warning(request, gettext("The task does not run any more."))
    return model_admin.address_of(task.pk)
