"""Filters that take typed text: a small form with suggestions instead of a link for each of hundreds of values.

The forms send GET requests and need no script; the suggestions are a ``datalist``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from django.contrib import admin
from django.http import HttpRequest


class FormFilter(admin.SimpleListFilter):
    """A filter by one typed value, with suggestions."""

    template = "admin/django_pglock/filter_form.html"
    #: The type of the input.
    input_type = "search"
    #: What to type, shown in the empty input.
    placeholder: Any = ""

    def suggestions(self) -> Iterable[str]:
        """Return the values that the browser suggests. They are not queried: a query would read the whole table."""
        return ()

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Return none: the form takes any value."""
        return []

    def has_output(self) -> bool:
        """Return True: the form is always shown."""
        return True

    def choices(self, changelist: Any) -> Iterator[Any]:
        """Yield what the template shows: the value, the suggestions, and the parameters of the other filters."""
        own = {str(self.parameter_name), "p", "e"}
        yield {
            "value": self.value() or "",
            "suggestions": sorted(self.suggestions()),
            # ``filter_params`` has one list of values for each parameter.
            "others": [(name, each) for name, values in changelist.filter_params.items() if name not in own
                       for each in (values if isinstance(values, list) else [values])],
            "query": changelist.query,
            "query_string": changelist.get_query_string(remove=sorted(own)),
        }  # fmt: skip

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        """Keep the rows with the value, if one was typed."""
        value = (self.value() or "").strip()
        return self.matching(request, queryset, value) if value else queryset

    def matching(self, request: HttpRequest, queryset: Any, value: str) -> Any:
        """Keep the rows with the value."""
        return queryset.filter(**{str(self.parameter_name): value})
