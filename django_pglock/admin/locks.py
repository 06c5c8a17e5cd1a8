"""The page of advisory locks: who holds what, who waits for whom, and a way to end a session."""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.http import HttpRequest
from django.utils.html import format_html, format_html_join
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext

from django_pglock.admin.actions import record
from django_pglock.admin.pages import ReadOnlyAdmin, elapsed
from django_pglock.models import AdvisoryLock


@admin.action(description=_("End the sessions that hold or wait for these locks"), permissions=["terminate"])
def terminate(model_admin: Any, request: HttpRequest, queryset: Any) -> None:
    """End the chosen sessions, if they still hold or wait for an advisory lock."""
    sessions = sorted(set(queryset.values_list("pid", flat=True)))
    ended = [pid for pid in sessions if AdvisoryLock.objects.terminate(pid)]
    record(request, AdvisoryLock, f"terminate: {', '.join(map(str, ended))}")
    text = ngettext("%(count)d session was ended.", "%(count)d sessions were ended.", len(ended))
    messages.success(request, text % {"count": len(ended)})


class AdvisoryLockAdmin(ReadOnlyAdmin):
    """Advisory locks of this database: holders, and under each its waiters."""

    list_display = [
        "named",
        "mode",
        "held_or_waits",
        "session",
        "waits_for",
        "waiters",
        "age",
        "application_name",
        "state",
    ]
    list_filter = [("is_granted", admin.BooleanFieldListFilter), ("mode", admin.AllValuesFieldListFilter)]
    search_fields = ["name"]
    search_help_text = _("The name of a lock, which is hashed for you; a key; or the number of a session.")
    ordering = ["key", "-is_granted", "since", "pid"]
    sortable_by = ()
    actions = [terminate]
    change_list_template = "admin/django_pglock/advisorylock/change_list.html"
    fields = (
        *("named", "key", "mode", "held_or_waits", "pid", "waits_for", "waiters", "since"),
        *("application_name", "state", "username", "client_address", "query"),
    )
    readonly_fields = fields

    def get_search_results(self, request: HttpRequest, queryset: Any, search_term: str) -> tuple[Any, bool]:
        """Search as a person means it: by name, key or session."""
        return (queryset.search(search_term) if search_term else queryset), False

    def has_terminate_permission(self, request: HttpRequest) -> bool:
        """May end sessions."""
        return request.user.has_perm("django_pglock.terminate_advisorylock")

    @admin.display(description=_("lock"))
    def named(self, row: AdvisoryLock) -> str:
        """Return the name; waiters stand indented under their holder."""
        style = "pglock-holder" if row.is_granted else "pglock-waiter"
        return format_html('<span class="{}" title="{}">{}</span>', style, "" if row.key is None else row.key, str(row))

    @admin.display(description=_("held"), boolean=True)
    def held_or_waits(self, row: AdvisoryLock) -> bool:
        """Say whether the session holds it."""
        return bool(row.is_granted)

    @admin.display(description=_("session"))
    def session(self, row: AdvisoryLock) -> str:
        """Return the server process, as pg_stat_activity knows it."""
        return str(row.pid)

    @admin.display(description=_("waits for"))
    def waits_for(self, row: AdvisoryLock) -> str:
        """Return the sessions in the way."""
        return format_html_join(", ", "{}", ((pid,) for pid in row.blocked_by)) or "-"

    @admin.display(description=_("since"))
    def age(self, row: AdvisoryLock) -> str:
        """Return for how long."""
        return elapsed(row.since) if row.since else "-"
