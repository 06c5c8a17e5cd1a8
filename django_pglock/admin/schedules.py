"""The admin pages of schedules: which functions run when, their last runs; verbs that enable, disable and run them.

People create schedules here, and edit these. Schedules of the code are shown.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.db import router
from django.http import HttpRequest
from django.utils import timezone
from django.utils.html import format_html
from django.utils.text import capfirst
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext

from django_pglock.admin.enqueue import EnqueueForm
from django_pglock.admin.pages import ReadOnlyAdmin, admin_action, mark, needs
from django_pglock.admin.task_page import as_moment, last_failures, tick_of
from django_pglock.admin.tasks import wait_or_run_time
from django_pglock.errors import TaskError
from django_pglock.models import Schedule, Task
from django_pglock.store.operate import Message, Verb
from django_pglock.store.schedules import known, last_runs, with_last_status
from django_pglock.tasks import registry
from django_pglock.tasks.compat import InvalidTask
from django_pglock.tasks.redaction import shown
from django_pglock.tasks.states import TaskStatus

#: A tick that is late by more than this is shown as overdue: no worker is that slow.
OVERDUE = timedelta(minutes=1)


@dataclass(frozen=True)
class ScheduleVerb(Verb):
    """A verb that is a method of the queryset of schedules."""

    unchanged: Message = lambda number: ngettext(
        "%(count)s schedule was not changed: it had this state already.",
        "%(count)s schedules were not changed: they had this state already.",
        number,
    )

    def apply(self, rows: Any, value: str = "", related: Sequence[int] = ()) -> int:
        """Apply it. ``run_now`` returns the ids of the new tasks."""
        found = getattr(rows, self.name)()
        return len(found) if isinstance(found, list) else int(found)


_VERBS = (
    ScheduleVerb(
        name="enable",
        permission="switch",
        label=_("Enable selected schedules"),
        button=_("Enable"),
        done=lambda number: ngettext("%(count)s schedule was enabled.", "%(count)s schedules were enabled.", number),
    ),
    ScheduleVerb(
        name="disable",
        permission="switch",
        label=_("Disable selected schedules"),
        button=_("Disable"),
        done=lambda number: ngettext("%(count)s schedule was disabled.", "%(count)s schedules were disabled.", number),
    ),
    ScheduleVerb(
        name="run_now",
        permission="switch",
        label=_("Run selected schedules now, in addition to their ticks"),
        button=_("Run now"),
        done=lambda number: ngettext("%(count)s task was enqueued.", "%(count)s tasks were enqueued.", number),
        unchanged=lambda number: ngettext(
            "%(count)s schedule enqueued no task: this process does not know the function, or a unique task exists.",
            "%(count)s schedules enqueued no task: this process does not know the functions, or unique tasks exist.",
            number,
        ),
    ),
)
VERBS = {verb.name: verb for verb in _VERBS}


def _functions() -> list[tuple[str, str]]:
    return [("", "-" * 9), *((path, path) for path in known(router.db_for_write(Schedule)))]


class ScheduleForm(forms.ModelForm, EnqueueForm):  # type: ignore[type-arg]
    """What people write: a function that this process knows, with arguments and times."""

    task_path = forms.ChoiceField(label=capfirst(_("task function")), choices=_functions)


NEXT, LAST = as_moment("next_at", Schedule), as_moment("last_at", Schedule)


@admin.register(Schedule)
class ScheduleAdmin(ReadOnlyAdmin):
    """The list of schedules, ordered by their next tick, and the page of one schedule."""

    list_display: Any = ["named", "times", NEXT, "last", "state"]
    list_filter = [("is_enabled", admin.BooleanFieldListFilter)]
    search_fields = ["name", "task_path"]
    ordering = ["next_at", "task_path"]
    sortable_by = ()
    verbs = VERBS
    actions = [admin_action(verb) for verb in VERBS.values()]
    form = ScheduleForm
    change_form_template = "admin/django_pglock/schedule/change_form.html"
    has_switch_permission = needs("change_schedule")
    #: Who may write arguments may call any function.
    has_add_permission = needs("add_schedule")
    #: Also for functions that no longer exist. A worker that knows a schedule of the code writes its row again.
    has_delete_permission = needs("delete_schedule")

    def has_change_permission(self, request: HttpRequest, obj: Schedule | None = None) -> bool:
        """Return whether the user may edit a schedule: only those of people."""
        return self.has_add_permission(request) and not (obj is not None and obj.is_of_code)

    def get_fields(self, request: HttpRequest, obj: Schedule | None = None) -> Any:
        """Return the columns. Arguments that are hidden, or that the user may not edit, are only shown."""
        is_hidden = obj is not None and any(shown(obj, name) != getattr(obj, name) for name in ("args", "kwargs"))
        is_fixed = is_hidden or not self.has_change_permission(request, obj)
        arguments = ["shown_args", "shown_kwargs"] if is_fixed else ["args", "kwargs"]
        function = "task_path" if obj is None or self.has_change_permission(request, obj) else "function"
        status = [] if obj is None else ["state", NEXT, LAST, "last"]
        return ["name", function, *arguments, "expression", "timezone", "note", "is_enabled", *status]

    def get_readonly_fields(self, request: HttpRequest, obj: Schedule | None = None) -> Any:
        """Return the fields without an input: a schedule keeps its name."""
        kept = [] if obj is None else ["name"]
        return [*kept, "function", "shown_args", "shown_kwargs", "state", NEXT, LAST, "last"]

    def get_queryset(self, request: HttpRequest) -> Any:
        """Add the status of the last task of each schedule."""
        return with_last_status(super().get_queryset(request))

    def perform(self, verb: Verb, request: HttpRequest, rows: Any, value: str) -> None:
        """Apply a verb, or say why not: arguments may no longer fit, and another program may have written the row."""
        try:
            super().perform(verb, request, rows, value)
        except (TaskError, InvalidTask) as error:
            messages.error(request, str(error))

    def verbs_of(self, row: Schedule) -> list[Verb]:
        """Return the verbs that change something."""
        return [VERBS["run_now"], VERBS["disable" if row.is_enabled else "enable"]]

    def context_of(self, request: HttpRequest, row: Schedule) -> dict[str, Any]:
        """Return the last runs, for those who may view tasks."""
        may_see = request.user.has_perm("django_pglock.view_task")
        return {"pglock_may_see_tasks": True, "pglock_runs": runs_of(row)} if may_see else {}

    @admin.display(description=_("arguments"))
    def shown_args(self, schedule: Schedule) -> str:
        """Return the positional arguments as text, without those that are hidden."""
        return json.dumps(shown(schedule, "args"))

    @admin.display(description=_("keyword arguments"))
    def shown_kwargs(self, schedule: Schedule) -> str:
        """Return the keyword arguments as text, without those that are hidden."""
        return json.dumps(shown(schedule, "kwargs"))

    @admin.display(description=_("name"))
    def named(self, schedule: Schedule) -> str:
        """Return the name and, below it, the function of a schedule of people."""
        text = '<span class="pglock-path">{}</span> <span class="pglock-id">{}</span>'
        return format_html(text, schedule.name, self.function(schedule))

    @admin.display(description=_("when"))
    def times(self, schedule: Schedule) -> str:
        """Return the times, and the time zone of those of cron."""
        return f"{schedule.expression} {schedule.timezone}"

    @admin.display(description=_("task function"))
    def function(self, schedule: Schedule) -> Any:
        """Return the function of a schedule of people."""
        return _("in the code") if schedule.is_of_code else schedule.task_path

    @admin.display(description=_("last task"))
    def last(self, schedule: Any) -> str:
        """Return a link to the task that was enqueued last, and its status."""
        if schedule.last_task is None:
            return "-"
        link, status = self.link_to_task(schedule.last_task), schedule.last_status
        return link if status is None else format_html("{} {}", link, mark(status.lower(), TaskStatus(status).label))

    @admin.display(description=_("state"))
    def state(self, schedule: Schedule) -> str:
        """Return whether the schedule is enabled, and whether its last tick is overdue."""
        if not schedule.is_enabled:
            return mark("cancelled", _("disabled"))
        if schedule.next_at < timezone.now() - OVERDUE and registry.find(schedule.task_path) is None:
            return mark("failed", _("overdue: this process does not know its function"))
        if schedule.next_at < timezone.now() - OVERDUE:
            return mark("failed", _("overdue: no worker enqueues it"))
        return mark("successful", _("enabled"))


def runs_of(schedule: Schedule) -> list[dict[str, Any]]:
    """Return the last runs of a schedule, the newest first, as lines of the table. At most three statements."""
    tasks = last_runs(Task.objects.db, schedule.task_path, schedule.last_task)
    errors = last_failures(Task.objects.db, tasks)
    return [
        {
            "task": task,
            "tick": tick_of(task),
            "took": wait_or_run_time(task),
            "error": ": ".join(filter(None, errors.get(task.pk, ())[:2])).removeprefix("builtins."),
        }
        for task in tasks
    ]
