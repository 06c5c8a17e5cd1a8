"""The page of leases: who has which, until when, and a way to take one away."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.contrib import admin, messages
from django.http import HttpRequest
from django.utils import timezone
from django.utils.html import format_html
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext

from django_pglock.admin.actions import record
from django_pglock.admin.pages import CappedChangeList, ReadOnlyAdmin, elapsed
from django_pglock.models import Lease


@admin.action(description=_("Take these leases away from their holders"), permissions=["free"])
def free(model_admin: Any, request: HttpRequest, queryset: Any) -> None:
    """Take the chosen leases away. Their holders notice it at their next renewal."""
    chosen = queryset.order_by()
    names = sorted(chosen.values_list("name", flat=True))
    count = chosen.free()
    record(request, Lease, f"free: {count} of {', '.join(names)}")
    text = ngettext("%(count)d lease was taken away.", "%(count)d leases were taken away.", count)
    (messages.success if count else messages.warning)(request, text % {"count": count})


class IsHeld(admin.SimpleListFilter):
    """Held, or free."""

    title = _("state")
    parameter_name = "held"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Iterable[tuple[str, Any]]:
        """Return the choices."""
        return [("1", _("held"))]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        """Return the leases that are held, if that was chosen."""
        return queryset.held() if self.value() == "1" else queryset


class LeaseChangeList(CappedChangeList):
    """Turns pages by number: the key is a hash, so there are no older ones along it."""

    older_query = ""


class LeaseAdmin(ReadOnlyAdmin):
    """Leases, the last taken first."""

    list_display = ["name", "state", "owner", "token", "ttl", "held", "renewed", "ends"]
    list_filter = [IsHeld]
    search_fields = ["name", "owner"]
    ordering = ["-acquired_at"]
    sortable_by = ()
    actions = [free]
    fields = (
        *("name", "state", "owner", "token", "ttl", "acquired_at", "renewed_at", "expires_at", "released_at"),
        *("key", "holder"),
    )
    readonly_fields = fields

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[CappedChangeList]:
        """Return our change list."""
        return LeaseChangeList

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """May delete a lease that nobody has. Its next token will be 1 again, which a fence would refuse.

        Without a lease, no: Django's deletion of many rows would not look whether they are held.
        """
        is_free = obj is not None and not is_held(obj)
        return is_free and request.user.has_perm("django_pglock.delete_lease")

    def has_free_permission(self, request: HttpRequest) -> bool:
        """May take leases away."""
        return request.user.has_perm("django_pglock.free_lease")

    @admin.display(description=_("state"))
    def state(self, lease: Lease) -> str:
        """Return whether it is held, given back, or came to its end."""
        if is_held(lease):
            return format_html('<span class="pglock-status pglock-running">{}</span>', _("held"))
        if lease.released_at is None:
            return format_html('<span class="pglock-status pglock-failed">{}</span>', _("ended, never given back"))
        if is_kept(lease):
            return format_html('<span class="pglock-status pglock-scheduled">{}</span>', _("kept from others"))
        return format_html('<span class="pglock-status pglock-successful">{}</span>', _("free"))

    @admin.display(description=_("held for"))
    def held(self, lease: Lease) -> str:
        """Return for how long it has been held."""
        return elapsed(lease.acquired_at) if is_held(lease) else "-"

    @admin.display(description=_("renewed"))
    def renewed(self, lease: Lease) -> str:
        """Return how long ago its holder gave a sign of life."""
        return str(_("%(time)s ago") % {"time": elapsed(lease.renewed_at)}) if is_held(lease) else "-"

    @admin.display(description=_("ends"))
    def ends(self, lease: Lease) -> str:
        """Return in how many seconds it ends without a sign of life."""
        if not is_held(lease) and not is_kept(lease):
            return "-"
        if lease.expires_at is None:
            return str(_("never"))
        return str(_("in %(seconds).0f s") % {"seconds": (lease.expires_at - timezone.now()).total_seconds()})


def is_held(lease: Lease) -> bool:
    """Say whether somebody has it, as far as this host's clock knows."""
    return lease.released_at is None and (lease.expires_at is None or lease.expires_at > timezone.now())


def is_kept(lease: Lease) -> bool:
    """Say whether it was given back early and is kept from others for its shortest time."""
    return lease.released_at is not None and lease.expires_at is not None and lease.expires_at > timezone.now()
