"""The admin page of leases: the holder and the expiry of each lease, and an action that revokes leases."""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext

from django_pglock.admin.actions import record
from django_pglock.admin.pages import OneChoiceFilter, ReadOnlyAdmin, mark, needs
from django_pglock.models import Lease


@admin.action(description=_("Revoke selected leases"), permissions=["free"])
def free(model_admin: Any, request: HttpRequest, queryset: Any) -> None:
    """Revoke the selected leases. Each holder notices the loss at its next renewal."""
    chosen = queryset.order_by()
    names = sorted(chosen.values_list("name", flat=True))
    count = chosen.free()
    record(request, Lease, f"free: {count} of {', '.join(names)}")
    text = ngettext("%(count)d lease was revoked.", "%(count)d leases were revoked.", count)
    (messages.success if count else messages.warning)(request, text % {"count": count})


class IsHeld(OneChoiceFilter):
    """Filter: only leases that are held."""

    title = _("state")
    parameter_name = "held"
    choice = ("1", _("held"))
    method = "held"


@admin.register(Lease)
class LeaseAdmin(ReadOnlyAdmin):
    """The list of leases, the latest acquired first, and the page of one lease.

    No user may delete a lease: the tokens of its name would start at 1 again, and code that compares tokens would
    refuse the next holder.
    """

    list_display = ["name", "state", "owner", "token", "ttl", "acquired_at", "renewed_at", "expires"]
    list_filter = [IsHeld]
    search_fields = ["name", "owner"]
    ordering = ["-acquired_at"]
    sortable_by = ()
    actions = [free]
    fields = (
        *("name", "state", "owner", "token", "ttl", "acquired_at", "renewed_at", "expires_at", "released_at"),
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
