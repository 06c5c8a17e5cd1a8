"""The admin page of queues: which queues are paused, since when and why; actions and buttons to pause and resume."""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.db import router, transaction
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext

from django_pglock.admin.pages import ReadOnlyAdmin, admin_action, elapsed, mark, needs, one_choice, record
from django_pglock.admin.task_list import queues_of_the_code
from django_pglock.models import Queue
from django_pglock.store.numbers import queues_without_row
from django_pglock.store.operate import Verb

VERBS = {
    "pause": Verb(
        name="pause",
        permission="pause",
        label=_("Pause selected queues"),
        button=_("Pause"),
        done=lambda number: ngettext("%(count)s queue was paused.", "%(count)s queues were paused.", number),
    ),
    "resume": Verb(
        name="resume",
        permission="pause",
        label=_("Resume selected queues"),
        button=_("Resume"),
        done=lambda number: ngettext("%(count)s queue was resumed.", "%(count)s queues were resumed.", number),
    ),
}


@admin.register(Queue)
class QueueAdmin(ReadOnlyAdmin):
    """The queues that have been paused at least once, and below them all others."""

    list_display = ["name", "state", "since", "paused_by", "reason"]
    list_filter = [one_choice("paused", _("state"), choice=("1", _("paused")), method="paused")]
    search_fields = ["name"]
    ordering = ["name"]
    sortable_by = ()
    verbs = VERBS
    actions = [admin_action(verb) for verb in VERBS.values()]
    change_list_template = "admin/django_pglock/queue/change_list.html"
    change_form_template = "admin/django_pglock/queue/change_form.html"
    fields = ("name", "state", "since", "paused_by", "reason")
    has_pause_permission = needs("pause_queue")

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return whether the user may delete this row: not while the queue is paused, for that would resume it."""
        is_deletable = obj is not None and obj.paused_at is None
        return is_deletable and request.user.has_perm("django_pglock.delete_queue")

    def seen(self, request: HttpRequest, object_id: str) -> Any:
        """Return a queue that the user may view. One that has never been paused gets its row here."""
        if self.has_view_permission(request) and object_id in _without_row():
            Queue.objects.db_manager(router.db_for_write(Queue)).get_or_create(name=object_id)
        return super().seen(request, object_id)

    def verbs_of(self, row: Queue) -> list[Verb]:
        """Return the verb that changes the state of the queue."""
        return [VERBS["resume" if row.paused_at else "pause"]]

    def perform(self, verb: Verb, request: HttpRequest, rows: Any, value: str) -> None:
        """Pause or resume queues, show how many changed, and write one log entry. The value is the reason."""
        names = sorted(rows.values_list("pk", flat=True))
        queues = Queue.objects.db_manager(router.db_for_write(Queue))
        about = {"by": request.user.get_username(), "reason": value} if verb.name == "pause" else {}
        with transaction.atomic(using=queues.db):
            changed = [name for name in names if getattr(queues, verb.name)(name, **about)]
            text = f"{verb.name}: {', '.join(changed) or '-'}" + (f" ({value})" if value else "")
            record(request, Queue, text, object_id=names[0] if len(names) == 1 else None)
        (messages.success if changed else messages.warning)(request, verb.message(verb.done, len(changed)))

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        """Add the queues without a row, which have never been paused, and the address of the list of tasks."""
        others = [] if request.GET else _without_row()
        may_see = request.user.has_perm("django_pglock.view_task")
        tasks = self.address("changelist", model="task") if may_see else ""
        about = {"pglock_queues": others, "pglock_tasks": tasks, "may_pause": self.has_pause_permission(request)}
        return super().changelist_view(request, {**about, **(extra_context or {})})

    @admin.display(description=_("state"))
    def state(self, queue: Queue) -> str:
        """Return whether the queue is paused."""
        if queue.paused_at:
            return mark("failed", _("paused"))
        return mark("successful", _("active"))

    @admin.display(description=_("since"))
    def since(self, queue: Queue) -> str:
        """Return how long the queue has been paused."""
        return elapsed(queue.paused_at) if queue.paused_at else "-"


def _without_row() -> list[str]:
    return queues_without_row(Queue.objects.db, also=queues_of_the_code())
