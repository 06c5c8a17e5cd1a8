"""The lookups that the query string of a list page may contain: those of its filters and links, and no others.

Django serves any lookup on the fields of a model. With ``?kwargs__email__startswith=u`` a user who may only view tasks
could guess a redacted argument letter by letter, and each guess would read the whole table.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.contrib import admin
from django.contrib.admin.utils import get_fields_from_path
from django.contrib.admin.widgets import url_params_from_lookup_dict

#: The lookups in the links of Django's field filters. A filter of any other class may use each of these lookups.
_LOOKUPS = (
    (admin.AllValuesFieldListFilter, ("",)),
    (admin.BooleanFieldListFilter, ("__exact",)),
    (admin.ChoicesFieldListFilter, ("__exact",)),
    (admin.DateFieldListFilter, ("__gte", "__lt")),
    (admin.EmptyFieldListFilter, ("__isempty",)),
    (object, ("", "__exact", "__gte", "__lt", "__isempty")),
)


def lookups_of(model: Any, list_filter: Any) -> Iterator[str]:
    """Yield the lookups in the links of one ``list_filter`` item. The filter is not made, because some send queries."""
    if callable(list_filter):
        yield from filter(None, [getattr(list_filter, "parameter_name", None)])
        return
    path, kind = (list_filter, object) if isinstance(list_filter, str) else list_filter
    path = getattr(path, "name", path)
    field: Any = get_fields_from_path(model, path)[-1]
    if field.is_relation:
        yield f"{path}__{field.target_field.name if field.concrete else field.related_model._meta.pk.name}__exact"
    else:
        yield from (path + suffix for suffix in _suffixes(kind))
    if getattr(field, "null", True):
        yield f"{path}__isnull"


def is_choice_of_foreign_key(model: Any, lookup: str, value: str) -> bool:
    """Return whether a foreign key to the model has this lookup and value in its ``limit_choices_to``.

    The icon of ``raw_id_fields`` opens the list with these lookups.
    """
    choices = (each() if callable(each) else each for each in model._meta.related_fkey_lookups)
    return any((lookup, value) in url_params_from_lookup_dict(each).items() for each in choices)


def _suffixes(kind: Any) -> tuple[str, ...]:
    return next(suffixes for each, suffixes in _LOOKUPS if issubclass(kind, each))
