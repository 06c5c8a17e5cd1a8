"""What our list pages have in common: nothing is counted beyond ten thousand, and nothing can be added by hand."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.contrib.admin.views.main import ChangeList
from django.core.paginator import Paginator
from django.http import HttpRequest
from django.utils import timezone
from django.utils.functional import cached_property
from django.utils.timesince import timesince

# Django's classes are generic only for type checkers.
if TYPE_CHECKING:
    AnyModelAdmin = admin.ModelAdmin[Any]
    AnyPaginator = Paginator[Any]
else:
    AnyModelAdmin = admin.ModelAdmin
    AnyPaginator = Paginator

#: Rows that are counted at most. Counting ten million takes seconds, and nobody turns to page 200.
MOST_COUNTED = 10_000


def elapsed(since: datetime) -> str:
    """Return how long ago something was: in seconds up to two minutes, then as Django says it."""
    seconds = (timezone.now() - since).total_seconds()
    return f"{max(seconds, 0):.0f} s" if seconds < 120 else timesince(since)


class CappedPaginator(AnyPaginator):
    """Counts up to ``MOST_COUNTED`` rows and stops."""

    @cached_property
    def count(self) -> int:
        """The number of rows, or the cap."""
        rows: Any = self.object_list
        return rows.order_by().values("pk")[:MOST_COUNTED].count()  # type: ignore[no-any-return]


class CappedChangeList(ChangeList):
    """Knows whether there are more rows than were counted, and where the next older ones begin."""

    @property
    def is_capped(self) -> bool:
        """There are at least as many rows as are counted."""
        return self.result_count >= MOST_COUNTED

    @property
    def older_query(self) -> str:
        """The query string of the rows behind the last one shown: a walk along the key."""
        rows = list(self.result_list)
        return self.get_query_string({"id__lt": rows[-1].pk}, remove=["p"]) if rows else ""


class ReadOnlyAdmin(AnyModelAdmin):
    """A list and a page to look at. Changes go through actions, which ask the guarded verbs."""

    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    list_per_page = 100
    list_max_show_all = 100
    paginator = CappedPaginator

    class Media:
        """A stylesheet of our own; no inline style and no script, so that a strict CSP has nothing to forbid."""

        css = {"all": ["django_pglock/admin.css"]}

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        """Return our change list."""
        return CappedChangeList

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Rows are made by ``enqueue``, by workers, and by PostgreSQL."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """No field is edited; actions have permissions of their own."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """What runs must not lose its row."""
        return False
