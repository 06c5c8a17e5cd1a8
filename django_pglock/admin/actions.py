"""Buttons for people: each is one guarded statement, with a permission, a message and an audit entry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.contrib import messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.http import HttpRequest
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext_lazy


@dataclass(frozen=True)
class Verb:
    """One thing that may be asked of tasks."""

    name: str
    permission: str
    #: On the list, and on the button of one task.
    label: Any
    button: Any
    #: From where it leads somewhere; elsewhere there is no button.
    statuses: frozenset[str]
    #: Plural message with ``%(count)d``.
    done: Any
    apply: Callable[[Any], int]


VERBS = {
    verb.name: verb
    for verb in (
        Verb(
            "reset_stuck",
            "reset",
            gettext_lazy("Reset stuck tasks"),
            gettext_lazy("Reset"),
            frozenset({"RUNNING"}),
            ngettext_lazy("%(count)d stuck task is ready again.", "%(count)d stuck tasks are ready again.", "count"),
            lambda rows: rows.reset_stuck(),
        ),
        Verb(
            "retry",
            "retry",
            gettext_lazy("Retry failed or cancelled tasks"),
            gettext_lazy("Retry"),
            frozenset({"FAILED", "CANCELLED"}),
            ngettext_lazy("%(count)d task is ready again.", "%(count)d tasks are ready again.", "count"),
            lambda rows: rows.retry(),
        ),
        Verb(
            "run_now",
            "retry",
            gettext_lazy("Run scheduled tasks now"),
            gettext_lazy("Run now"),
            frozenset({"SCHEDULED"}),
            ngettext_lazy("%(count)d scheduled task is ready.", "%(count)d scheduled tasks are ready.", "count"),
            lambda rows: rows.run_now(),
        ),
        Verb(
            "cancel",
            "cancel",
            gettext_lazy("Cancel tasks"),
            gettext_lazy("Cancel"),
            frozenset({"SCHEDULED", "READY", "RUNNING"}),
            ngettext_lazy("%(count)d task was cancelled.", "%(count)d tasks were cancelled.", "count"),
            lambda rows: rows.cancel(),
        ),
    )
}


def perform(verb: Verb, request: HttpRequest, queryset: Any, *, object_id: str | None = None) -> int:
    """Ask the verb of the tasks, say what became of it, and leave one audit entry. Returns how many moved."""
    chosen = queryset.order_by()
    # Actions of the admin arrive sliced or ordered for display; the verb needs the plain set.
    asked = _capped_count(chosen)
    count = verb.apply(chosen)
    if count:
        messages.success(request, verb.done % {"count": count})
    skipped = max(0, asked - count)
    if skipped or not count:
        messages.warning(
            request,
            _("%(count)d of the chosen tasks were left alone: they are in another state by now, or being settled.")
            % {"count": skipped},
        )
    record(request, queryset.model, f"{verb.name}: {count}", object_id=object_id)
    return count


def _capped_count(queryset: Any) -> int:
    from django_pglock.admin.pages import MOST_COUNTED

    return queryset.values("pk")[:MOST_COUNTED].count()  # type: ignore[no-any-return]


def record(request: HttpRequest, model: Any, text: str, *, object_id: str | None = None) -> None:
    """Leave one audit entry, however many rows were touched."""
    LogEntry.objects.create(
        user_id=request.user.pk or 0,
        content_type=ContentType.objects.get_for_model(model, for_concrete_model=False),
        object_id=object_id,
        object_repr=text[:200],
        action_flag=CHANGE,
        change_message=text,
    )


def admin_action(verb: Verb) -> Callable[..., None]:
    """Return the verb as an action of a list page."""

    def action(model_admin: Any, request: HttpRequest, queryset: Any) -> None:
        perform(verb, request, queryset)

    action.__name__ = verb.name
    action.short_description = verb.label  # type: ignore[attr-defined]
    action.allowed_permissions = (verb.permission,)  # type: ignore[attr-defined]
    return action


__all__ = ["VERBS", "Verb", "admin_action", "perform", "record"]
