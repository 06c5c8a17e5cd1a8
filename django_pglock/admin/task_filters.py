"""The filters of the list of tasks. None of them reads the table of tasks to offer its choices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.contrib import admin
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from django_pglock.models import Task
from django_pglock.store.count import in_status
from django_pglock.store.ready import ready_queues
from django_pglock.tasks import registry
from django_pglock.tasks.compat import task_backends


class StatusFilter(admin.ChoicesFieldListFilter):
    """By status, in words that have an index."""

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        """Keep the rows with the chosen status."""
        return in_status(queryset, status) if (status := status_of(request)) else super().queryset(request, queryset)


class KnownValuesFilter(admin.SimpleListFilter):
    """A filter whose choices come from what the process knows: a DISTINCT over the table would read all of it."""

    def known(self) -> Sequence[str]:
        """Return the values to offer."""
        raise NotImplementedError

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Offer the known values, and the one in use if it is not among them."""
        values = {*self.known(), *filter(None, [self.value()])}
        return [(value, value) for value in sorted(values)]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        """Keep the rows with the chosen value."""
        return queryset.filter(**{str(self.parameter_name): self.value()}) if self.value() else queryset


class QueueFilter(KnownValuesFilter):
    """By queue: those of the settings, and those with something ready."""

    title = _("queue")
    parameter_name = "queue"

    def known(self) -> Sequence[str]:
        configured = {queue for backend in task_backends.all() for queue in backend.queues}
        return sorted(configured | set(ready_queues(Task.objects.db)))


class TaskPathFilter(KnownValuesFilter):
    """By function: those that this process knows. Nothing is imported for it."""

    title = _("task function")
    parameter_name = "task_path"

    def known(self) -> Sequence[str]:
        return registry.known_paths()


class StuckFilter(admin.SimpleListFilter):
    """What needs somebody: running without a living worker."""

    title = _("attention")
    parameter_name = "attention"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        """Offer the one question."""
        return [("stuck", _("Stuck: its worker is gone"))]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        """Keep what is stuck."""
        return queryset.stuck() if self.value() == "stuck" else queryset


def status_of(request: HttpRequest) -> str:
    """Return the status that a list is about, if it is about one."""
    chosen = request.GET.getlist("status__exact")
    return chosen[0] if len(chosen) == 1 else ""
