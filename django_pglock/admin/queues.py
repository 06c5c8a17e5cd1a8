"""The admin page of queues: which queues are paused, since when and why; actions and buttons to pause and resume."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from django.contrib import admin, messages
from django.contrib.admin.utils import quote, unquote
from django.core.exceptions import PermissionDenied, ValidationError
from django.db import router, transaction
from django.forms import ModelForm
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import URLPattern, reverse
from django.utils.html import format_html
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from django_pglock.admin.actions import record
from django_pglock.admin.pages import OneChoiceFilter, ReadOnlyAdmin, elapsed, mark, needs
from django_pglock.admin.task_list import queues_of_the_code
from django_pglock.models import Queue
from django_pglock.store.numbers import queues_without_row
from django_pglock.store.pause import check_pausable

if TYPE_CHECKING:
    AnyModelForm = ModelForm[Queue]
else:
    AnyModelForm = ModelForm

VERBS = ("pause", "resume")


@admin.action(description=_("Pause selected queues"), permissions=["pause"])
def pause(model_admin: Any, request: HttpRequest, queryset: Any) -> None:
    """Pause the selected queues: workers claim no task from them."""
    perform("pause", request, queryset.values_list("pk", flat=True))


@admin.action(description=_("Resume selected queues"), permissions=["pause"])
def resume(model_admin: Any, request: HttpRequest, queryset: Any) -> None:
    """Resume the selected queues: workers claim tasks from them again."""
    perform("resume", request, queryset.values_list("pk", flat=True))


def perform(verb: str, request: HttpRequest, names: Iterable[str], *, reason: str = "") -> None:
    """Pause or resume queues, show how many changed, and write one log entry."""
    chosen = sorted(names)
    queues = Queue.objects.db_manager(router.db_for_write(Queue))
    with transaction.atomic(using=queues.db):
        if verb == "pause":
            changed = [name for name in chosen if queues.pause(name, by=request.user.get_username(), reason=reason)]
            text = ngettext("%(count)d queue was paused.", "%(count)d queues were paused.", len(changed))
        else:
            changed = [name for name in chosen if queues.resume(name)]
            text = ngettext("%(count)d queue was resumed.", "%(count)d queues were resumed.", len(changed))
        about = f"{verb}: {', '.join(changed) or '-'}" + (f" ({reason})" if reason else "")
        record(request, Queue, about, object_id=chosen[0] if len(chosen) == 1 else None)
    (messages.success if changed else messages.warning)(request, text % {"count": len(changed)})


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
            check_pausable(name)
        except ValueError as error:
            raise ValidationError(str(error)) from error
        return name


class QueueAdmin(ReadOnlyAdmin):
    """The queues that have been paused at least once, and below them all others. To add a row pauses a queue."""

    form = QueueForm
    list_display = ["shown_name", "state", "since", "paused_by", "reason"]
    list_filter = [IsPaused]
    search_fields = ["name"]
    ordering = ["name"]
    sortable_by = ()
    actions = [pause, resume]
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

    def context_of(self, request: HttpRequest, obj: Any) -> dict[str, Any]:
        """Return the button, if the user may press it."""
        if not self.has_pause_permission(request):
            return {}
        verb, label = ("resume", _("Resume")) if obj.paused_at else ("pause", _("Pause"))
        url = self.address("verb", quote(obj.pk), verb)
        return {"pglock_verb": {"label": label, "url": url}}

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        """Add the queues without a row, which have never been paused, and the address of the list of tasks."""
        others = [] if request.GET else queues_without_row(Queue.objects.db, also=queues_of_the_code())
        may_see = request.user.has_perm("django_pglock.view_task")
        tasks = reverse("admin:django_pglock_task_changelist", current_app=self.admin_site.name) if may_see else ""
        about = {"pglock_queues": others, "pglock_tasks": tasks}
        return super().changelist_view(request, {**about, **(extra_context or {})})

    def get_urls(self) -> list[URLPattern]:
        """Add the URL of the button."""
        own = self.own_path("<path:object_id>/do/<str:verb>/", "verb", self.verb_view, "POST")
        return [own, *super().get_urls()]

    def verb_view(self, request: HttpRequest, object_id: str, verb: str) -> HttpResponse:
        """Pause or resume the queue: only by POST, with CSRF protection, and with the permission to pause."""
        if verb not in VERBS or not self.has_pause_permission(request):
            raise PermissionDenied
        queue = self.seen(request, unquote(object_id))
        # PostgreSQL cannot store a NUL character in text.
        perform(verb, request, [queue.pk], reason=request.POST.get("reason", "").replace("\x00", ""))
        return HttpResponseRedirect(self.address("change", quote(queue.pk)))

    @admin.display(description=_("name"))
    def shown_name(self, queue: Queue) -> str:
        """Return the name, cut if it is long: it would push the other columns off the screen."""
        return format_html('<span class="pglock-name" title="{0}">{0}</span>', queue.name)

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
