"""The admin page of schedules: which functions run when; actions that enable, disable and run them now."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.contrib import admin
from django.http import HttpRequest
from django.urls import reverse
from django.utils import timezone
from django.utils.html import format_html
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext_lazy

from django_pglock.admin.actions import admin_action
from django_pglock.admin.pages import ReadOnlyAdmin, mark
from django_pglock.models import Schedule
from django_pglock.verbs import Verb

#: A tick that is late by more than this is shown as overdue: no worker is that slow.
OVERDUE = timedelta(minutes=1)


VERBS = (
    Verb(
        name="enable",
        permission="switch",
        label=_("Enable selected schedules"),
        button=_("Enable"),
        statuses=frozenset(),
        apply=lambda rows, progress: rows.enable(),
        done=ngettext_lazy("%(count)s schedule was enabled.", "%(count)s schedules were enabled.", "number"),
        left=ngettext_lazy(
            "%(count)s schedule was not changed: it was enabled already.",
            "%(count)s schedules were not changed: they were enabled already.",
            "number",
        ),
    ),
    Verb(
        name="disable",
        permission="switch",
        label=_("Disable selected schedules"),
        button=_("Disable"),
        statuses=frozenset(),
        apply=lambda rows, progress: rows.disable(),
        done=ngettext_lazy("%(count)s schedule was disabled.", "%(count)s schedules were disabled.", "number"),
        left=ngettext_lazy(
            "%(count)s schedule was not changed: it was disabled already.",
            "%(count)s schedules were not changed: they were disabled already.",
            "number",
        ),
    ),
    Verb(
        name="run_now",
        permission="switch",
        label=_("Run selected schedules now, in addition to their ticks"),
        button=_("Run now"),
        statuses=frozenset(),
        apply=lambda rows, progress: len(rows.run_now()),
        done=ngettext_lazy("%(count)s task was enqueued.", "%(count)s tasks were enqueued.", "number"),
        left=ngettext_lazy(
            "%(count)s schedule enqueued no task: this process does not know the function, or a unique task exists.",
            "%(count)s schedules enqueued no task: this process does not know the functions, or unique tasks exist.",
            "number",
        ),
    ),
)


class ScheduleAdmin(ReadOnlyAdmin):
    """The list of schedules, ordered by their next tick, and the page of one schedule."""

    list_display = ["task_path", "expression", "timezone", "next_at", "last_at", "last", "state"]
    list_filter = [("is_enabled", admin.BooleanFieldListFilter)]
    search_fields = ["task_path"]
    ordering = ["next_at", "task_path"]
    sortable_by = ()
    actions = [admin_action(verb) for verb in VERBS]
    fields = ("task_path", "expression", "timezone", "state", "next_at", "last_at", "last")
    readonly_fields = fields

    def has_switch_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may enable, disable and run schedules."""
        return request.user.has_perm("django_pglock.change_schedule")

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return whether the user may delete schedules.

        This is for functions that no longer exist. A worker that knows the function creates the row again when it
        starts.
        """
        return request.user.has_perm("django_pglock.delete_schedule")

    @admin.display(description=_("last task"))
    def last(self, schedule: Schedule) -> str:
        """Return a link to the task that was enqueued last."""
        if schedule.last_task is None:
            return "-"
        address = reverse(
            "admin:django_pglock_task_change", args=[schedule.last_task], current_app=self.admin_site.name
        )
        return format_html('<a href="{}">#{}</a>', address, schedule.last_task)

    @admin.display(description=_("state"))
    def state(self, schedule: Schedule) -> str:
        """Return whether the schedule is enabled, and whether its last tick is overdue."""
        if not schedule.is_enabled:
            return mark("cancelled", _("disabled"))
        if schedule.next_at < timezone.now() - OVERDUE:
            return mark("failed", _("overdue: no worker enqueues it"))
        return mark("successful", _("enabled"))
