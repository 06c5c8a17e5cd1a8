"""The page of queues: which are paused, since when and why, and a way to pause and to resume."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from django.contrib import admin, messages
from django.contrib.admin.utils import quote, unquote
from django.core.exceptions import PermissionDenied, ValidationError
from django.db import router, transaction
from django.forms import ModelForm
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseNotAllowed, HttpResponseRedirect
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext

from django_pglock.admin.actions import record
from django_pglock.admin.pages import CappedChangeList, ReadOnlyAdmin, elapsed
from django_pglock.models import Queue
from django_pglock.store.pause import check_pausable

if TYPE_CHECKING:
    AnyModelForm = ModelForm[Queue]
else:
    AnyModelForm = ModelForm

VERBS = ("pause", "resume")


@admin.action(description=_("Pause these queues"), permissions=["pause"])
def pause(model_admin: Any, request: HttpRequest, queryset: Any) -> None:
    """Let no worker claim from the chosen queues."""
    perform("pause", request, queryset.values_list("pk", flat=True))


@admin.action(description=_("Resume these queues"), permissions=["pause"])
def resume(model_admin: Any, request: HttpRequest, queryset: Any) -> None:
    """Let workers claim from the chosen queues again."""
    perform("resume", request, queryset.values_list("pk", flat=True))


def perform(verb: str, request: HttpRequest, names: Iterable[str], *, reason: str = "") -> None:
    """Pause or resume queues, say how many that were, and leave one audit entry."""
    chosen = sorted(names)
    queues = Queue.objects.using(router.db_for_write(Queue))
    with transaction.atomic(using=queues.db):
        if verb == "pause":
            changed = [name for name in chosen if queues.pause(name, by=request.user.get_username(), reason=reason)]
            text = ngettext("%(count)d queue is paused.", "%(count)d queues are paused.", len(changed))
        else:
            changed = [name for name in chosen if queues.resume(name)]
            text = ngettext("%(count)d queue goes on.", "%(count)d queues go on.", len(changed))
        about = f"{verb}: {', '.join(changed) or '-'}"
        record(request, Queue, about, object_id=chosen[0] if len(chosen) == 1 else None)
    (messages.success if changed else messages.warning)(request, text % {"count": len(changed)})


class IsPaused(admin.SimpleListFilter):
    """Paused, or all."""

    title = _("state")
    parameter_name = "paused"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Iterable[tuple[str, Any]]:
        """Return the choices."""
        return [("1", _("paused"))]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        """Return the queues that are paused, if that was chosen."""
        return queryset.paused() if self.value() == "1" else queryset


class QueueChangeList(CappedChangeList):
    """Turns pages by number: the key is a name, so there are no older ones along it."""

    older_query = ""


class QueueForm(AnyModelForm):
    """Asks for the name of a queue to pause."""

    def clean_name(self) -> str:
        """Return the name. Raises ``ValidationError`` where ``pause()`` would refuse it."""
        name: str = self.cleaned_data["name"]
        try:
            check_pausable(router.db_for_write(Queue), name)
        except ValueError as error:
            raise ValidationError(str(error)) from error
        return name


class QueueAdmin(ReadOnlyAdmin):
    """Queues that have ever been paused. To add one is to pause it."""

    form = QueueForm
    list_display = ["name", "state", "since", "paused_by", "reason"]
    list_filter = [IsPaused]
    search_fields = ["name"]
    ordering = ["name"]
    sortable_by = ()
    actions = [pause, resume]
    change_form_template = "admin/django_pglock/queue/change_form.html"

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[CappedChangeList]:
        """Return our change list."""
        return QueueChangeList

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """Ask for a name and a reason; show all of what is there."""
        return ["name", "reason"] if obj is None else ["name", "state", "since", "paused_by", "reason"]

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """Return all fields of a queue that is there."""
        return [] if obj is None else self.get_fields(request, obj)

    def has_add_permission(self, request: HttpRequest) -> bool:
        """May pause a queue by its name."""
        return self.has_pause_permission(request)

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """May delete a queue's row that says nothing: while it is paused, that would resume it silently."""
        is_deletable = obj is not None and obj.paused_at is None
        return is_deletable and request.user.has_perm("django_pglock.delete_queue")

    def has_pause_permission(self, request: HttpRequest) -> bool:
        """May pause and resume."""
        return request.user.has_perm("django_pglock.pause_queue")

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        """Pause the queue that was named; Django leaves the audit entry."""
        queues = Queue.objects.using(router.db_for_write(Queue))
        queues.pause(obj.name, by=request.user.get_username(), reason=obj.reason)

    def context_of(self, request: HttpRequest, obj: Any) -> dict[str, Any]:
        """Return the button that this person may press."""
        if not self.has_pause_permission(request):
            return {}
        verb, label = ("resume", _("Resume")) if obj.paused_at else ("pause", _("Pause"))
        url = self._address("verb", quote(obj.pk), verb)
        return {"pglock_verb": {"label": label, "url": url, "asks_reason": verb == "pause"}}

    def get_urls(self) -> list[URLPattern]:
        """Add the address of the button."""
        view = self.admin_site.admin_view(self.verb_view)
        return [path("<path:object_id>/do/<str:verb>/", view, name="django_pglock_queue_verb"), *super().get_urls()]

    def verb_view(self, request: HttpRequest, object_id: str, verb: str) -> HttpResponse:
        """Do what the button asks. Only by POST, with CSRF protection, and with the permission to pause."""
        if request.method != "POST":
            return HttpResponseNotAllowed(["POST"])
        queue = self.get_object(request, unquote(object_id))
        if verb not in VERBS or not self.has_pause_permission(request) or not self.has_view_permission(request, queue):
            raise PermissionDenied
        if queue is None:
            raise Http404
        # A NUL is no text for PostgreSQL.
        perform(verb, request, [queue.pk], reason=request.POST.get("reason", "").replace("\x00", ""))
        return HttpResponseRedirect(self._address("change", quote(queue.pk)))

    def _address(self, page: str, *arguments: Any) -> str:
        return reverse(f"admin:django_pglock_queue_{page}", args=arguments, current_app=self.admin_site.name)

    @admin.display(description=_("state"))
    def state(self, queue: Queue) -> str:
        """Return whether it is paused."""
        if queue.paused_at:
            return format_html('<span class="pglock-status pglock-failed">{}</span>', _("paused"))
        return format_html('<span class="pglock-status pglock-successful">{}</span>', _("open"))

    @admin.display(description=_("since"))
    def since(self, queue: Queue) -> str:
        """Return for how long it has been paused."""
        return elapsed(queue.paused_at) if queue.paused_at else "-"
