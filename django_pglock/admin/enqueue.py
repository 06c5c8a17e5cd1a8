"""Pages that enqueue a task by form: any function that this process knows, or a task again with other arguments."""

from __future__ import annotations

import re
from inspect import Signature
from typing import Any

from django import forms
from django.contrib import messages
from django.contrib.admin.models import ADDITION
from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.db import router, transaction
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.html import format_html
from django.utils.text import capfirst
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from django_pglock.admin.pages import record
from django_pglock.errors import TaskError
from django_pglock.models import Task
from django_pglock.tasks import registry
from django_pglock.tasks.call_keys import call_signature
from django_pglock.tasks.compat import InvalidTask, task_backends
from django_pglock.tasks.redaction import shown


class ArgumentsField(forms.JSONField):
    """A list or an object, typed as JSON. What the function does not take, ``enqueue()`` refuses."""

    def __init__(self, kind: type, label: Any, help_text: Any) -> None:
        self.kind = kind
        widget = forms.Textarea(attrs={"rows": 5, "cols": 60, "spellcheck": "false"})
        # Without an initial value, the text would be "null".
        about = {"label": capfirst(label), "help_text": help_text, "initial": kind}
        super().__init__(required=False, widget=widget, **about)

    def clean(self, value: Any) -> Any:
        """Return the list or the object; an empty one for an empty text."""
        found = super().clean(value) or self.kind()
        if not isinstance(found, self.kind):
            raise forms.ValidationError(self.help_text)
        return found


class EnqueueForm(forms.Form):
    """The arguments of one call."""

    args = ArgumentsField(list, _("arguments"), _("Give a JSON list, such as [1, 2]."))
    kwargs = ArgumentsField(dict, _("keyword arguments"), _('Give a JSON object, such as {"name": 1}.'))


def enqueue_page(model_admin: Any, request: HttpRequest, task_id: int | None = None) -> HttpResponse:
    """Choose a function, fill in its arguments, enqueue: needs the permission to add tasks.

    With the id of a task, enqueue its function with other arguments: needs the permission to change tasks.
    """
    may_enqueue = model_admin.has_enqueue_permission if task_id is None else model_admin.has_again_permission
    if not may_enqueue(request):
        raise PermissionDenied
    earlier = None if task_id is None else model_admin.seen(request, str(task_id))
    path = earlier.task_path if earlier else request.GET.get("function", "").strip()
    functions = [] if earlier else [each.module_path for each in registry.definitions() if not each.is_own]
    task: Any = registry.find(path)
    context = {
        "title": gettext("Run again with other arguments") if earlier else gettext("Enqueue a task"),
        "task": earlier,
        "functions": functions,
        "path": path,
        "is_unknown": bool(path) and task is None,
    }
    if task is not None:
        values = {name: (shown(earlier, name), getattr(earlier, name)) for name in ("args", "kwargs") if earlier}
        # Of arguments that are hidden in part, all have to be typed: the text of a hidden value would be enqueued.
        initial = {name: stored for name, (seen, stored) in values.items() if seen == stored}
        form = EnqueueForm(request.POST if request.method == "POST" else None, initial=initial)
        if form.is_valid() and (address := _enqueued(model_admin, request, task, form, earlier)):
            return HttpResponseRedirect(address)
        context |= {"form": form, "signature": _signature(task), "has_hidden": len(initial) < len(values)}
    answer: HttpResponse = model_admin.answer(request, "task/enqueue", context)
    return answer


def _signature(task: Any) -> str:
    """Return the parameters of a call as text. Those of a function with ``group=`` are not those of a call."""
    if task.group is not None:
        return ""
    signature = call_signature(task.func, task.takes_context).replace(return_annotation=Signature.empty)
    # Annotations may be texts, of which Python would show the quotes.
    return re.sub(r": '([^']*)'", r": \1", str(signature))


def _enqueued(model_admin: Any, request: HttpRequest, task: Any, form: EnqueueForm, earlier: Task | None) -> str:
    """Enqueue the task and return the address of its page. If a call is refused, the form gets the error: return ""."""
    about = f"enqueue again, with other arguments, #{earlier.pk}" if earlier else "enqueue"
    try:
        if earlier is not None:
            task = task.using(backend=earlier.backend, queue_name=earlier.queue, priority=earlier.priority)
        with transaction.atomic(using=router.db_for_write(Task)):
            result = task.enqueue(*form.cleaned_data["args"], **form.cleaned_data["kwargs"])
            text, has_page = f"{about}: {task.module_path} #{result.id}", _has_page(result)
            record(request, Task, text, object_id=str(result.id) if has_page else None, flag=ADDITION)
    except (TaskError, InvalidTask, ImproperlyConfigured, TypeError, ValueError, RecursionError) as error:
        form.add_error(None, str(error))
        return ""
    link = model_admin.link_to_task(result.id) if has_page else f"#{result.id}"
    messages.success(request, format_html(gettext("Task {link} was enqueued."), link=link))
    return str(model_admin.address("change", result.id) if has_page else model_admin.address("changelist"))


def _has_page(result: Any) -> bool:
    """Return whether the task is in the database of the pages. In another one, the id may be that of another task."""
    return getattr(task_backends[result.backend], "database", None) == router.db_for_write(Task)
