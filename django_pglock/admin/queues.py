"""The admin page of queues: which queues are paused, since when and why; actions and buttons to pause and resume."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.contrib import admin, messages
from django.core.exceptions import ValidationError
from django.db import router, transaction
from django.forms import ModelForm
from django.http import HttpRequest, HttpResponse
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from django_pglock.admin.actions import admin_action, record
from django_pglock.admin.pages import OneChoiceFilter, ReadOnlyAdmin, elapsed, mark, needs
from django_pglock.admin.task_list import queues_of_the_code
from django_pglock.models import Queue
from django_pglock.store.numbers import queues_without_row
from django_pglock.store.operate import Verb
from django_pglock.store.pause import check_pausable

if TYPE_CHECKING:
    AnyModelForm = ModelForm[Queue]
else:
    AnyModelForm = ModelForm

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


class IsPaused(OneChoiceFilter):
    """Filter: only paused queues."""

    title = _("state")
    parameter_name = "paused"
    choice = ("1", _("paused"))
    method = "paused"


class QueueForm(AnyModelForm):
    """The form that pauses a queue by its name."""

    def clean_name(self) -> str:
        """Return the name. Raises ``ValidationError`` if ``pause()`` would refuse the name."""
        name: str = self.cleaned_data["name"]
        try:
            check_pausable(router.db_for_write(Queue), name)
        except ValueError as error:
            raise ValidationError(str(error)) from error
        return name


class QueueAdmin(ReadOnlyAdmin):
    """The queues that have been paused at least once, and below them all others. To add a row pauses a queue."""

    form = QueueForm
    list_display = ["name", "state", "since", "paused_by", "reason"]
    list_filter = [IsPaused]
    search_fields = ["name"]
    ordering = ["name"]
    sortable_by = ()
    verbs = VERBS
    actions = [admin_action(verb) for verb in VERBS.values()]
    change_list_template = "admin/django_pglock/queue/change_list.html"
    change_form_template = "admin/django_pglock/queue/change_form.html"
    has_add_permission = has_pause_permission = needs("pause_queue")

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """Return the fields of the form that pauses a queue, or all fields of an existing row."""
        return ["name", "reason"] if obj is None else ["name", "state", "since", "paused_by", "reason"]

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """Return all fields of an existing row; none of the form that pauses a queue."""
        return [] if obj is None else self.get_fields(request, obj)

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return whether the user may delete this row: not while the queue is paused, for that would resume it."""
        is_deletable = obj is not None and obj.paused_at is None
        return is_deletable and request.user.has_perm("django_pglock.delete_queue")

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        """Pause the queue. Django writes the log entry."""
        queues = Queue.objects.db_manager(router.db_for_write(Queue))
        queues.pause(obj.name, by=request.user.get_username(), reason=obj.reason)

    def response_add(self, request: HttpRequest, obj: Any, post_url_continue: str | None = None) -> HttpResponse:
        """Show a message about the change. Django's own message would be that a queue was added."""
        text = gettext("Queue %(name)s was paused: workers claim no task from it.")
        messages.success(request, text % {"name": obj.pk})
        return self.response_post_save_add(request, obj)

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
        others = [] if request.GET else queues_without_row(Queue.objects.db, also=queues_of_the_code())
        may_see = request.user.has_perm("django_pglock.view_task")
        tasks = self.address("changelist", model="task") if may_see else ""
        about = {"pglock_queues": others, "pglock_tasks": tasks}
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
