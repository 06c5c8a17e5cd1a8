"""What our list pages have in common: nothing is counted beyond ten thousand, and nothing can be added by hand."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.views.main import SEARCH_VAR, ChangeList
from django.core.exceptions import ValidationError
from django.core.paginator import Paginator
from django.http import HttpRequest
from django.utils import timezone
from django.utils.functional import cached_property
from django.utils.timesince import timesince
from django.utils.translation import gettext as _

from django_pglock.admin.lookups import is_choice_of_foreign_key, lookups_of

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
    return _("%(seconds).0f s") % {"seconds": max(seconds, 0)} if seconds < 120 else timesince(since)


class AtLeast(int):
    """A count that stopped: compares and pages as a number, and reads as "10000+" wherever Django's templates do."""

    def __str__(self) -> str:
        # Where digits are grouped, a mark behind them would be grouped with them.
        return f">{int(self)}" if settings.USE_THOUSAND_SEPARATOR else f"{int(self)}+"


class CappedPaginator(AnyPaginator):
    """Counts up to ``MOST_COUNTED`` rows and stops."""

    @cached_property
    def count(self) -> int:
        """The number of rows, or the cap."""
        rows: Any = self.object_list
        # In the order of the list, so that it walks the index and the rows that the list is about to show.
        found: int = rows.values("pk")[: MOST_COUNTED + 1].count()
        return AtLeast(MOST_COUNTED) if found > MOST_COUNTED else found


class CappedChangeList(ChangeList):
    """Knows whether there are more rows than were counted, and where the next older ones begin."""

    @property
    def is_capped(self) -> bool:
        """There are more rows than are counted."""
        return isinstance(self.paginator.count, AtLeast)

    @property
    def older_query(self) -> str:
        """The query string of the rows behind the last one shown, if there are any: a walk along the key."""
        rows = list(self.result_list)
        has_more = self.is_capped or self.page_num < self.paginator.num_pages
        if not rows or not has_more or rows[0].pk < rows[-1].pk:
            return ""
        return self.get_query_string({"id__lt": rows[-1].pk}, remove=["p"])

    def get_queryset(self, request: HttpRequest, *arguments: Any, **options: Any) -> Any:
        """Refuse what PostgreSQL has no text for, as Django refuses any other value that fits no field."""
        if any("\x00" in text for name, texts in request.GET.lists() if name != SEARCH_VAR for text in texts):
            raise IncorrectLookupParameters
        return super().get_queryset(request, *arguments, **options)

    def get_ordering_field(self, field_name: Any) -> Any:
        """Sort by nothing but what the page offers, whatever the address says: the rest has no index."""
        return super().get_ordering_field(field_name) if field_name in (self.sortable_by or ()) else None


class ReadOnlyAdmin(AnyModelAdmin):
    """A list and a page to look at. Changes go through actions, which ask the guarded verbs."""

    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    list_per_page = 100
    list_max_show_all = 100
    paginator = CappedPaginator
    #: Lookups that links of our own put into the address of the list. Those of ``list_filter`` are known.
    linked_lookups: tuple[str, ...] = ()

    class Media:
        """A stylesheet of our own; no inline style and no script, so that a strict CSP has nothing to forbid."""

        css = {"all": ["django_pglock/admin.css"]}

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        """Return our change list."""
        return CappedChangeList

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:
        """Serve the lookups of filters and links, each given once. Django answers 400 to all others, without a query.

        Any other lookup would show a person what is redacted, and no index serves it.
        """
        filters: Any = self.list_filter
        if request is not None:
            filters = self.get_list_filter(request)
            if len(request.GET.getlist(lookup)) > 1:
                return False
        served = {*self.linked_lookups, *(name for each in filters for name in lookups_of(self.model, each))}
        if self.date_hierarchy:
            served.update(f"{self.date_hierarchy}__{part}" for part in ("year", "month", "day"))
        return lookup in served or is_choice_of_foreign_key(self.model, lookup, value)

    def to_field_allowed(self, request: HttpRequest, to_field: str) -> bool:
        """Find rows by their key, and by no other field that ``_to_field`` names."""
        return to_field == self.opts.pk.name

    def get_object(self, request: HttpRequest, object_id: str, from_field: Any = None) -> Any:
        """Find nothing by what cannot be a key."""
        return super().get_object(request, object_id, from_field) if self._is_key(object_id) else None

    def response_action(self, request: HttpRequest, *arguments: Any, **options: Any) -> Any:
        """Do nothing to what cannot be a key, and say so, where Django would fail."""
        if all(map(self._is_key, request.POST.getlist(ACTION_CHECKBOX_NAME))):
            return super().response_action(request, *arguments, **options)
        self.message_user(request, _("Nothing of what was chosen is there any more."), messages.WARNING)
        return None

    def _is_key(self, text: str) -> bool:
        key: Any = self.opts.pk
        try:
            key.to_python(text)
        except ValidationError:
            return False
        # PostgreSQL has no text with a NUL.
        return "\x00" not in text

    def render_change_form(
        self,
        request: HttpRequest,
        context: Any,
        add: bool = False,
        change: bool = False,
        form_url: str = "",
        obj: Any = None,
    ) -> Any:
        """Add what the page of a row shows besides its fields."""
        if obj is not None:
            context = {**context, **self.context_of(request, obj)}
        return super().render_change_form(request, context, add, change, form_url, obj)

    def context_of(self, request: HttpRequest, obj: Any) -> dict[str, Any]:
        """Return what the template of a row's page shows besides: buttons that this person may press, and warnings."""
        return {}

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Rows are made by ``enqueue``, by workers, and by PostgreSQL."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """No field is edited; actions have permissions of their own."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """What runs must not lose its row."""
        return False
