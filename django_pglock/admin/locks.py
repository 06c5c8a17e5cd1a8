"""The admin page of advisory locks: which sessions hold or wait for which lock, and an action that ends sessions."""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext

from django_pglock.admin.actions import record
from django_pglock.admin.pages import ReadOnlyAdmin, elapsed, needs
from django_pglock.models import AdvisoryLock


@admin.action(description=_("End the sessions that hold or wait for selected locks"), permissions=["terminate"])
def terminate(model_admin: Any, request: HttpRequest, queryset: Any) -> None:
    """End the sessions of the selected rows, if they still hold or wait for an advisory lock."""
    sessions = sorted(set(queryset.values_list("pid", flat=True)))
    ended = [pid for pid in sessions if AdvisoryLock.objects.terminate(pid)]
    record(request, AdvisoryLock, f"terminate: {', '.join(map(str, ended))}")
    text = ngettext("%(count)d session was ended.", "%(count)d sessions were ended.", len(ended))
    messages.success(request, text % {"count": len(ended)})


@admin.register(AdvisoryLock)
class AdvisoryLockAdmin(ReadOnlyAdmin):
    """The list of advisory locks of the database: each holder, and below it the sessions that wait for the lock."""

    list_display = ["named", "mode", "is_granted", "pid", "blocked_by", "waiters", "age", "application_name", "state"]
    list_filter = [("is_granted", admin.BooleanFieldListFilter), ("mode", admin.AllValuesFieldListFilter)]
    search_fields = ["name"]
    search_help_text = _("The name of a lock, a key, or the process id of a session.")
    ordering = ["key", "-is_granted", "since", "pid"]
    sortable_by = ()
    actions = [terminate]
    change_list_template = "admin/django_pglock/advisorylock/change_list.html"
    fields = (
        *("named", "key", "mode", "is_granted", "pid", "blocked_by", "waiters", "since"),
        *("application_name", "state", "username", "client_address", "query"),
    )
    has_terminate_permission = needs("terminate_advisorylock")

    def get_search_results(self, request: HttpRequest, queryset: Any, search_term: str) -> tuple[Any, bool]:
        """Search by the name of a lock, which is hashed to its key, by key, or by session."""
        return (queryset.search(search_term) if search_term else queryset), False

    @admin.display(description=_("lock"))
    def named(self, row: AdvisoryLock) -> str:
        """Return the name of the lock. Waiting sessions are indented below the holder."""
        style = "pglock-holder" if row.is_granted else "pglock-waiter"
        return format_html('<span class="{}" title="{}">{}</span>', style, "" if row.key is None else row.key, str(row))

    @admin.display(description=_("since"))
    def age(self, row: AdvisoryLock) -> str:
        """Return how long the session has waited or, for a holder, the age of its transaction or last statement."""
        return elapsed(row.since) if row.since else "-"
