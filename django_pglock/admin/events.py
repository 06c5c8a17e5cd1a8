"""The admin page of events: what was emitted, until when it is kept, and a form that emits one."""

from __future__ import annotations

from typing import Any, ClassVar

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.models import ADDITION
from django.core.exceptions import PermissionDenied
from django.db import router, transaction
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import URLPattern
from django.utils.html import format_html
from django.utils.http import urlencode
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from django_pglock.admin.pages import ReadOnlyAdmin, needs, record
from django_pglock.admin.task_page import as_moment, in_one_line
from django_pglock.errors import StepError, TaskArgumentsError
from django_pglock.models import Event
from django_pglock.store.steps import emit
from django_pglock.tasks.redaction import shown_payload
from django_pglock.tasks.step_records import LONGEST_NAME


class EmitForm(forms.Form):
    """The name and the payload of one event."""

    name = forms.CharField(label=_("name"), max_length=LONGEST_NAME, strip=False)
    payload = forms.JSONField(
        label=_("payload"),
        required=False,
        help_text=_('A JSON value, such as {"weight": 3} or "a text"; empty for none.'),
        widget=forms.Textarea(attrs={"rows": 5, "cols": 60, "spellcheck": "false"}),
    )


@admin.display(description=_("payload"))
def payload(event: Event) -> str:
    """Return the payload in one line, unless it is redacted."""
    return in_one_line(shown_payload(event.name, event.payload))


@admin.display(description=_("tasks"))
def waiting_tasks(event: Event) -> str:
    """Return a link to the tasks that wait for the event."""
    return format_html(
        '<a href="../../../task/?{}">{}</a>', urlencode({"event": event.name}), _("Tasks that wait for it")
    )


DATES = (as_moment("emitted_at", Event), as_moment("expires_at", Event))


@admin.register(Event)
class EventAdmin(ReadOnlyAdmin):
    """The events, the newest first. A search finds names by their beginning."""

    list_display: Any = ["name", *DATES, payload]
    search_fields = ["name"]
    search_help_text = _("The beginning of the name of an event.")
    sortable_by = ()
    # Django's action loads each selected row, and "all" may be ten million.
    actions = None
    change_list_template = "admin/django_pglock/event/change_list.html"
    fields: ClassVar[Any] = (
        "name",
        payload,
        *DATES,
        waiting_tasks,
    )
    #: To emit an event is to add one.
    has_emit_permission = needs("add_event")
    has_delete_permission = needs("delete_event")

    def get_ordering(self, request: HttpRequest) -> Any:
        """Sort along an index: by the date until which events are kept, and if a name is searched, by name."""
        return ["name"] if request.GET.get("q") else ["-expires_at"]

    def get_search_results(self, request: HttpRequest, queryset: Any, search_term: str) -> tuple[Any, bool]:
        """Search by the beginning of the name."""
        return (queryset.filter(name__startswith=search_term) if search_term else queryset), False

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        """Add the address of the form."""
        emit_at = self.address("emit") if self.has_emit_permission(request) else ""
        return super().changelist_view(request, {"pglock_emit": emit_at, **(extra_context or {})})

    def get_urls(self) -> list[URLPattern]:
        """Add the URL of the form."""
        return [self.own_path("emit/", "emit", self.emit_view, "GET", "HEAD", "POST"), *super().get_urls()]

    def emit_view(self, request: HttpRequest) -> HttpResponse:
        """Emit an event: needs the permission to add events."""
        if not self.has_emit_permission(request):
            raise PermissionDenied
        form = EmitForm(request.POST or None, initial={"name": request.GET.get("name", "")})
        if form.is_valid() and self._emitted(request, form):
            return HttpResponseRedirect(self.address("changelist"))
        return self.answer(request, "event/emit", {"title": gettext("Emit an event"), "form": form})

    def _emitted(self, request: HttpRequest, form: EmitForm) -> bool:
        name, using = form.cleaned_data["name"], router.db_for_write(Event)
        try:
            with transaction.atomic(using=using):
                if is_new := emit(name, form.cleaned_data["payload"], using=using):
                    # Not the payload, which may be redacted.
                    record(request, Event, f"emit: {name}", object_id=name, flag=ADDITION)
        except (StepError, TaskArgumentsError) as error:
            form.add_error(None, str(error))
            return False
        if is_new:
            messages.success(request, gettext("The event %(event)s was emitted.") % {"event": name})
        else:
            text = gettext("The event %(event)s is there already, so nothing was changed.")
            messages.warning(request, text % {"event": name})
        return True
