"""The page with the stack of a running task: a button requests the stack, and the page shows the answer."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.db import router, transaction
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed, HttpResponseRedirect
from django.utils.translation import gettext

from django_pglock.admin.actions import record
from django_pglock.admin.attempts import answer, seen_task
from django_pglock.models import Task
from django_pglock.store.requests_to_worker import request_stack, wait_for_stack

#: Seconds for which a request waits for the answer of the worker. Most answers take milliseconds.
TIMEOUT = 2.0


def stack_page(model_admin: Any, request: HttpRequest, task_id: int) -> HttpResponse:
    """Request the stack of a running task (POST), or show the latest answer (GET)."""
    if request.method not in ("GET", "HEAD", "POST"):
        return HttpResponseNotAllowed(["GET", "HEAD", "POST"])
    if not model_admin.has_stack_permission(request):
        raise PermissionDenied
    task = seen_task(model_admin, request, task_id)
    using = router.db_for_write(Task)
    if request.method != "POST":
        found = wait_for_stack(using, task.pk, timeout=TIMEOUT)
        context = {"title": gettext("Stack"), "found": found, "is_running": task.status == "RUNNING"}
        return answer(model_admin, request, task, "stack", context)
    with transaction.atomic(using=using):
        if request_stack(using, task.pk):
            record(request, Task, "stack: asked for", object_id=str(task.pk))
            return HttpResponseRedirect(model_admin.address_of_stack(task.pk))
    messages.warning(request, gettext("The task does not run any more."))
    return HttpResponseRedirect(model_admin.address_of(task.pk))
