"""The admin pages of schedules: which functions run when, their last runs; verbs that enable, disable and run them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.contrib import admin
from django.contrib.admin.utils import quote, unquote
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import URLPattern, reverse
from django.utils import timezone
from django.utils.html import format_html
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from django_pglock.admin.actions import admin_action, perform
from django_pglock.admin.pages import CappedChangeList, ReadOnlyAdmin, elapsed, mark, needs
from django_pglock.admin.task_page import last_failures, tick_of
from django_pglock.models import Schedule, Task
from django_pglock.store.operate import Verb
from django_pglock.store.schedules import last_runs, set_last_status
from django_pglock.tasks.schedules import Timing
from django_pglock.tasks.states import TaskStatus

#: A tick that is late by more than this is shown as overdue: no worker is that slow.
OVERDUE = timedelta(minutes=1)
#: The most ticks without a task that are counted between two runs.
MOST_TICKS = 50


class ScheduleVerb(Verb):
    """A verb that is a method of the queryset of schedules."""

    def apply(self, rows: Any, value: str = "") -> int:
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
        unchanged=lambda number: ngettext(
            "%(count)s schedule was not changed: it was enabled already.",
            "%(count)s schedules were not changed: they were enabled already.",
            number,
        ),
    ),
    ScheduleVerb(
        name="disable",
        permission="switch",
        label=_("Disable selected schedules"),
        button=_("Disable"),
        done=lambda number: ngettext("%(count)s schedule was disabled.", "%(count)s schedules were disabled.", number),
        unchanged=lambda number: ngettext(
            "%(count)s schedule was not changed: it was disabled already.",
            "%(count)s schedules were not changed: they were disabled already.",
            number,
        ),
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


class ScheduleChangeList(CappedChangeList):
    """Knows the status of the last task of each schedule of the page."""

    def get_results(self, request: HttpRequest) -> None:
        """Find the schedules of the page."""
        super().get_results(request)
        self.result_list: Any = list(self.result_list)
        set_last_status(Task.objects.db, self.result_list)


class ScheduleAdmin(ReadOnlyAdmin):
    """The list of schedules, ordered by their next tick, and the page of one schedule."""

    list_display = ["task_path", "expression", "timezone", "next_at", "last_at", "last", "shown_status", "state"]
    list_filter = [("is_enabled", admin.BooleanFieldListFilter)]
    search_fields = ["task_path"]
    ordering = ["next_at", "task_path"]
    sortable_by = ()
    actions = [admin_action(verb) for verb in VERBS.values()]
    fields = ("task_path", "expression", "timezone", "state", "next_at", "last_at", "last", "shown_status")
    readonly_fields = fields
    change_form_template = "admin/django_pglock/schedule/change_form.html"
    has_switch_permission = needs("change_schedule")
    #: For functions that no longer exist. A worker that knows the function writes the row again.
    has_delete_permission = needs("delete_schedule")

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ScheduleChangeList]:
        """Return our change list."""
        return ScheduleChangeList

    def get_object(self, request: HttpRequest, object_id: str, from_field: Any = None) -> Any:
        """Return the schedule with the status of its last task."""
        schedule = super().get_object(request, object_id, from_field)
        set_last_status(Task.objects.db, [schedule] if schedule is not None else [])
        return schedule

    def context_of(self, request: HttpRequest, obj: Any) -> dict[str, Any]:
        """Return the buttons that the user may press, and the last runs for those who may view tasks."""
        names = ("run_now", "disable" if obj.is_enabled else "enable") if self.has_switch_permission(request) else ()
        buttons = [{"label": VERBS[name].button, "url": self.address("verb", quote(obj.pk), name)} for name in names]
        if not request.user.has_perm("django_pglock.view_task"):
            return {"pglock_verbs": buttons}
        return {
            "pglock_verbs": buttons,
            "pglock_may_see_tasks": True,
            "pglock_runs": runs_of(obj),
            "pglock_skipped": skipped_between(obj, obj.last_at, obj.next_at),
        }

    def get_urls(self) -> list[URLPattern]:
        """Add the URL of the buttons."""
        own = self.own_path("<path:object_id>/do/<str:verb>/", "verb", self.verb_view, "POST")
        return [own, *super().get_urls()]

    def verb_view(self, request: HttpRequest, object_id: str, verb: str) -> HttpResponse:
        """Apply the verb of a button: only by POST, with CSRF protection, and with the permission to switch."""
        if verb not in VERBS or not self.has_switch_permission(request):
            raise PermissionDenied
        schedule = self.seen(request, unquote(object_id))
        perform(VERBS[verb], request, self.get_queryset(request).filter(pk=schedule.pk))
        return HttpResponseRedirect(self.address("change", quote(schedule.pk)))

    @admin.display(description=_("last task"))
    def last(self, schedule: Schedule) -> str:
        """Return a link to the task that was enqueued last."""
        if schedule.last_task is None:
            return "-"
        address = reverse(
            "admin:django_pglock_task_change", args=[schedule.last_task], current_app=self.admin_site.name
        )
        return format_html('<a href="{}">#{}</a>', address, schedule.last_task)

    @admin.display(description=_("last status"))
    def shown_status(self, schedule: Any) -> str:
        """Return the status of the task that was enqueued last."""
        status = schedule.last_status
        return "-" if status is None else mark(status.lower(), TaskStatus(status).label)

    @admin.display(description=_("state"))
    def state(self, schedule: Schedule) -> str:
        """Return whether the schedule is enabled, and whether its last tick is overdue."""
        if not schedule.is_enabled:
            return mark("cancelled", _("disabled"))
        if schedule.next_at < timezone.now() - OVERDUE:
            return mark("failed", _("overdue: no worker enqueues it"))
        return mark("successful", _("enabled"))


@dataclass(frozen=True)
class Run:
    """One tick and its task. Times are texts."""

    task: Task
    tick: datetime | None
    wait: str
    took: str
    error: str
    #: How many ticks right before this one have enqueued no task, as text; empty for none, or if that is not known.
    skipped: str


def runs_of(schedule: Schedule) -> list[Run]:
    """Return the last runs of a schedule, the newest first. At most three statements."""
    using = Task.objects.db
    tasks = last_runs(using, schedule.task_path, schedule.last_task)
    errors = last_failures(using, tasks)
    ticks = [_tick(task) for task in tasks]
    return [
        Run(
            task,
            tick,
            _wait(task, tick),
            _run_time(task),
            ": ".join(filter(None, errors.get(task.pk, ()))).removeprefix("builtins."),
            skipped_between(schedule, before, tick),
        )
        for task, tick, before in zip(tasks, ticks, [*ticks[1:], None], strict=False)
    ]


def skipped_between(schedule: Schedule, tick: datetime | None, later: datetime | None) -> str:
    """Return how many ticks lie between two ticks of a schedule, as text; empty for none, or if that is not known.

    They are counted by the present expression of the schedule.
    """
    if tick is None or later is None:
        return ""
    try:
        count = Timing(schedule.expression, schedule.timezone).count_between(tick, later, most=MOST_TICKS + 1)
    except Exception:  # noqa: BLE001 - cronsim is missing here, or another version of the code has written the row
        return ""
    return f"{MOST_TICKS}+" if count > MOST_TICKS else str(count or "")


def _tick(task: Task) -> datetime | None:
    try:
        tick = datetime.fromisoformat(tick_of(task))
    except ValueError:
        return None
    return tick if timezone.is_aware(tick) else None


def _wait(task: Task, tick: datetime | None) -> str:
    """Return how long after the tick the task was started first."""
    if task.started_at is None or tick is None:
        return "-"
    return elapsed(tick, _aware(task.started_at))


def _run_time(task: Task) -> str:
    """Return how long the last attempt took, or has taken so far."""
    if task.last_attempted_at is None or (task.finished_at is None and task.status != "RUNNING"):
        return "-"
    if task.finished_at is None:
        return elapsed(task.last_attempted_at)
    took = (task.finished_at - task.last_attempted_at).total_seconds()
    return gettext("%(seconds).3f s") % {"seconds": took}


def _aware(moment: Any) -> Any:
    """Return a date as it is without USE_TZ, too: the ticks in ``meta`` have a zone."""
    return moment if timezone.is_aware(moment) else timezone.make_aware(moment)
