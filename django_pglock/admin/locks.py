"""The admin pages of advisory locks and of leases: who holds or waits for which, and actions that take them away."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from django.contrib import admin, messages
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext

from django_pglock.admin.pages import ReadOnlyAdmin, elapsed, mark, needs, one_choice, record
from django_pglock.admin.task_page import as_moment
from django_pglock.models import AdvisoryLock, Lease


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

    left_out_if_equal = ("mode", "blocked_by", "waiters", "application_name", "state")
    list_display = ["named", "mode", "pid", "blocked_by", "waiters", "age", "application_name", "state"]
    list_filter = [("is_granted", admin.BooleanFieldListFilter), ("mode", admin.AllValuesFieldListFilter)]
    search_fields = ["name"]
    search_help_text = _("The name of a lock, a key, or the process id of a session.")
    ordering = ["key", "-is_granted", "since", "pid"]
    sortable_by = ()
    actions = [terminate]
    change_list_template = "admin/django_pglock/advisorylock/change_list.html"
    fields: ClassVar[Any] = (
        *("named", "key", "mode", "is_granted", "pid", "blocked_by", "waiters", as_moment("since", AdvisoryLock)),
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


@admin.action(description=_("Revoke selected leases"), permissions=["free"])
def free(model_admin: Any, request: HttpRequest, queryset: Any) -> None:
    """Revoke the selected leases. Each holder notices the loss at its next renewal."""
    chosen = queryset.order_by()
    names = sorted(chosen.values_list("name", flat=True))
    count = chosen.free()
    record(request, Lease, f"free: {count} of {', '.join(names)}")
    text = ngettext("%(count)d lease was revoked.", "%(count)d leases were revoked.", count)
    (messages.success if count else messages.warning)(request, text % {"count": count})


as_moment_of_lease = partial(as_moment, model=Lease)


@admin.register(Lease)
class LeaseAdmin(ReadOnlyAdmin):
    """The list of leases, the latest acquired first, and the page of one lease.

    No user may delete a lease: the tokens of its name would start at 1 again, and code that compares tokens would
    refuse the next holder.
    """

    list_display: Any = [
        "name",
        "state",
        "owner",
        "token",
        "ttl",
        *map(as_moment_of_lease, ("acquired_at", "renewed_at")),
        "expires",
    ]
    list_filter = [one_choice("held", _("state"), choice=("1", _("held")), method="held")]
    search_fields = ["name", "owner"]
    ordering = ["-acquired_at"]
    sortable_by = ()
    actions = [free]
    fields: ClassVar[Any] = (
        *("name", "state", "owner", "token", "ttl"),
        *map(as_moment_of_lease, ("acquired_at", "renewed_at", "expires_at", "released_at")),
        *("key", "holder"),
    )
    has_free_permission = needs("free_lease")

    def get_queryset(self, request: HttpRequest) -> Any:
        """Add the server's time, and the state by this time."""
        leases: Any = super().get_queryset(request)
        return leases.with_state()

    @admin.display(description=_("state"))
    def state(self, lease: Any) -> str:
        """Return whether the lease is held, free, expired, or released but not free yet."""
        if lease.is_held:
            return mark("running", _("held"))
        if lease.released_at is None:
            return mark("failed", _("expired, never released"))
        if lease.is_kept:
            return mark("scheduled", _("released, not free yet"))
        return mark("successful", _("free"))

    @admin.display(description=_("expires"))
    def expires(self, lease: Any) -> str:
        """Return in how many seconds the lease expires unless its holder renews it."""
        if not lease.is_held and not lease.is_kept:
            return "-"
        if lease.expires_at is None:
            return str(_("never"))
        return str(_("in %(seconds).0f s") % {"seconds": (lease.expires_at - lease.server_time).total_seconds()})
