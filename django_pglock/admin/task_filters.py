"""The filters of the list of tasks. No filter reads the whole table of tasks to find its choices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.contrib import admin
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from django_pglock.admin.pages import OneChoiceFilter
from django_pglock.models import Task
from django_pglock.store.count import in_status
from django_pglock.store.ready import ready_queues
from django_pglock.tasks import registry
from django_pglock.tasks.compat import task_backends


class StatusFilter(admin.ChoicesFieldListFilter):
    """Filter by status, with the condition of the index that serves it."""

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        """Keep the rows with the selected status."""
        if status := status_of(request):
            return in_status(queryset, status, is_narrow=is_narrow(request))
        return super().queryset(request, queryset)


class KnownValuesFilter(admin.SimpleListFilter):
    """A filter whose choices come from this process. SELECT DISTINCT would read the whole table."""

    def known(self) -> Sequence[str]:
        """Return the values that are offered as choices."""
        raise NotImplementedError

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Return the known values, and the selected value if it is not one of them."""
        values = {*self.known(), *filter(None, [self.value()])}
        return [(value, value) for value in sorted(values)]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        """Keep the rows with the selected value."""
        return queryset.filter(**{str(self.parameter_name): self.value()}) if self.value() else queryset


class QueueFilter(KnownValuesFilter):
    """Filter by queue: the queues of the settings, and queues with ready tasks."""

    title = _("queue")
    parameter_name = "queue"

    def known(self) -> Sequence[str]:
        configured = {queue for backend in task_backends.all() for queue in backend.queues}
        return sorted(configured | set(ready_queues(Task.objects.db)))


class TaskPathFilter(KnownValuesFilter):
    """Filter by task function: the functions that are registered in this process. The filter imports nothing."""

    title = _("task function")
    parameter_name = "task_path"

    def known(self) -> Sequence[str]:
        return registry.known_paths()


class StuckFilter(OneChoiceFilter):
    """Filter for tasks that need attention: running tasks whose worker is dead."""

    title = _("attention")
    parameter_name = "attention"
    choice = ("stuck", _("Stuck: worker is dead"))
    method = "stuck"


def is_narrow(request: HttpRequest) -> bool:
    """Return whether the list is filtered by a queue or by a function."""
    return bool(request.GET.get("queue") or request.GET.get("task_path"))


def status_of(request: HttpRequest) -> str:
    """Return the status by which the list is filtered; an empty string if there is none."""
    chosen = request.GET.getlist("status__exact")
    return chosen[0] if len(chosen) == 1 else ""
