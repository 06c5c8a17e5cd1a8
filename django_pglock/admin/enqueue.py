"""Pages that enqueue a task by form: any function that this process knows, or a task again with other arguments."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.contrib.admin.models import ADDITION
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.db import router, transaction
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.utils.html import format_html
from django.utils.translation import gettext

from django_pglock.admin.actions import record
from django_pglock.admin.enqueue_form import EnqueueForm, by_parameter
from django_pglock.errors import TaskError
from django_pglock.models import Task
from django_pglock.tasks import registry
from django_pglock.tasks.compat import InvalidTask, task_backends
from django_pglock.tasks.redaction import shown


def enqueue_page(model_admin: Any, request: HttpRequest) -> HttpResponse:
    """Choose a function, fill in its arguments, enqueue: needs the permission to add tasks."""
    if not model_admin.has_enqueue_permission(request):
        raise PermissionDenied
    path = request.GET.get("function", "").strip()
    task = registry.find(path)
    context = {"title": gettext("Enqueue a task"), "path": path, "is_unknown": bool(path) and task is None}
    form = EnqueueForm(task, request.POST if request.method == "POST" else None) if task is not None else None
    if form is not None and request.method == "POST":
        answer = _enqueued(model_admin, request, task, form, "enqueue")
        if answer is not None:
            return answer
    functions = [each.module_path for each in registry.definitions() if not each.is_own]
    return _page(model_admin, request, {**context, "form": form, "functions": functions})


def again_page(model_admin: Any, request: HttpRequest, task_id: int) -> HttpResponse:
    """Enqueue the function of a task with other arguments: needs the permission to change tasks."""
    if not (model_admin.has_view_permission(request) and model_admin.has_again_permission(request)):
        raise PermissionDenied
    row: Task | None = model_admin.get_object(request, str(task_id))
    if row is None:
        raise Http404
    task: Any = registry.find(row.task_path)
    context = {"title": gettext("Run again with other arguments"), "path": row.task_path, "original": row}
    if task is None:
        return _page(model_admin, request, {**context, "is_unknown": True})
    earlier = by_parameter(task, row.args, row.kwargs)
    visible = by_parameter(task, shown(row, "args"), shown(row, "kwargs"))
    form = EnqueueForm(task, request.POST if request.method == "POST" else None, shown=visible, stored=earlier)
    if request.method == "POST":
        about = f"enqueue again, with other arguments, #{row.pk}"
        same = {"backend": row.backend, "queue_name": row.queue, "priority": row.priority}
        answer = _enqueued(model_admin, request, task, form, about, **same)
        if answer is not None:
            return answer
    return _page(model_admin, request, {**context, "form": form})


def _enqueued(
    model_admin: Any, request: HttpRequest, task: Any, form: EnqueueForm, about: str, **using: Any
) -> HttpResponse | None:
    """Enqueue the task and redirect to its page. Return None if an argument is refused: the form then has the error."""
    if not form.is_valid():
        return None
    args, kwargs = form.call()
    try:
        with transaction.atomic(using=router.db_for_write(Task)):
            result = task.using(**using).enqueue(*args, **kwargs)
            text = f"{about}: {task.module_path} #{result.id}"
            record(request, Task, text, object_id=str(result.id) if _has_page(result) else None, flag=ADDITION)
    except (TaskError, InvalidTask, ImproperlyConfigured, TypeError, ValueError) as error:
        form.add_error(None, str(error))
        return None
    address, link = model_admin.address("changelist"), f"#{result.id}"
    if _has_page(result):
        address = model_admin.address("change", result.id)
        link = format_html('<a href="{}">{}</a>', address, link)
    messages.success(request, format_html(gettext("Task {link} was enqueued."), link=link))
    return HttpResponseRedirect(address)


def _has_page(result: Any) -> bool:
    """Return whether the task is in the database of the pages. In another one, the id may be that of another task."""
    return getattr(task_backends[result.backend], "database", None) == router.db_for_write(Task)


def _page(model_admin: Any, request: HttpRequest, context: dict[str, Any]) -> HttpResponse:
    site = model_admin.admin_site
    request.current_app = site.name
    about = {"opts": model_admin.opts, "media": model_admin.media}
    template = "admin/django_pglock/task/enqueue.html"
    return TemplateResponse(request, template, {**site.each_context(request), **about, **context})
