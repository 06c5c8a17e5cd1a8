"""The page of schedules: what runs by the clock, when, and a way to stop it or to have it at once."""

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
from django_pglock.admin.pages import CappedChangeList, ReadOnlyAdmin
from django_pglock.models import Schedule
from django_pglock.verbs import Verb

#: From how late on a tick is shown as overdue: workers are not that slow.
OVERDUE = timedelta(minutes=1)


VERBS = (
    Verb(
        "enable",
        "switch",
        _("Enable schedules"),
        _("Enable"),
        frozenset(),
        lambda rows, progress: rows.enable(),
        ngettext_lazy("%(count)s schedule is enabled.", "%(count)s schedules are enabled.", "number"),
        ngettext_lazy(
            "%(count)s schedule was left alone: it was enabled already.",
            "%(count)s schedules were left alone: they were enabled already.",
            "number",
        ),
    ),
    Verb(
        "disable",
        "switch",
        _("Disable schedules"),
        _("Disable"),
        frozenset(),
        lambda rows, progress: rows.disable(),
        ngettext_lazy("%(count)s schedule is disabled.", "%(count)s schedules are disabled.", "number"),
        ngettext_lazy(
            "%(count)s schedule was left alone: it was disabled already.",
            "%(count)s schedules were left alone: they were disabled already.",
            "number",
        ),
    ),
    Verb(
        "run_now",
        "switch",
        _("Run now, besides the schedule"),
        _("Run now"),
        frozenset(),
        lambda rows, progress: len(rows.run_now()),
        ngettext_lazy("%(count)s task was enqueued.", "%(count)s tasks were enqueued.", "number"),
        ngettext_lazy(
            "%(count)s schedule was left alone: its function is not known here, or there is such a task already.",
            "%(count)s schedules were left alone: their functions are not known here, or there are such tasks already.",
            "number",
        ),
    ),
)


class ScheduleChangeList(CappedChangeList):
    """Turns pages by number: the key is a path, so there are no older ones along it."""

    older_query = ""


class ScheduleAdmin(ReadOnlyAdmin):
    """Schedules, the next one to come first."""

    list_display = ["task_path", "expression", "timezone", "next_at", "last_at", "last", "state"]
    list_filter = [("is_enabled", admin.BooleanFieldListFilter)]
    search_fields = ["task_path"]
    ordering = ["next_at", "task_path"]
    sortable_by = ()
    actions = [admin_action(verb) for verb in VERBS]
    fields = ("task_path", "expression", "timezone", "state", "next_at", "last_at", "last")
    readonly_fields = fields

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[CappedChangeList]:
        """Return our change list."""
        return ScheduleChangeList

    def has_switch_permission(self, request: HttpRequest) -> bool:
        """May enable, disable and run now."""
        return request.user.has_perm("django_pglock.change_schedule")

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """May delete what is left of a function that is gone. One that a worker knows comes back when one starts."""
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
        """Return whether it is enabled, and whether somebody keeps it."""
        if not schedule.is_enabled:
            return format_html('<span class="pglock-status pglock-cancelled">{}</span>', _("disabled"))
        if schedule.next_at < timezone.now() - OVERDUE:
            return format_html('<span class="pglock-status pglock-failed">{}</span>', _("overdue: no worker keeps it"))
        return format_html('<span class="pglock-status pglock-successful">{}</span>', _("enabled"))
