"""Buttons for people: each is one guarded statement, with a permission, a message and an audit entry."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from django.contrib import messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.db import router, transaction
from django.http import HttpRequest
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext_lazy

from django_pglock.admin import pages
from django_pglock.store.move import WINDOW

#: Tasks that an audit entry names one by one.
MOST_NAMED = 100

_LEFT_ALONE = ngettext_lazy(
    "%(count)d of the chosen tasks was left alone: it is in another state by now, or being settled.",
    "%(count)d of the chosen tasks were left alone: they are in another state by now, or being settled.",
    "count",
)


@dataclass(frozen=True)
class Verb:
    """One thing that may be asked of tasks, or of schedules."""

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
    #: The same for what could not be moved.
    left: Any = _LEFT_ALONE


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
            ngettext_lazy(
                "%(count)d of the chosen tasks was left alone: its worker is alive, or it no longer runs.",
                "%(count)d of the chosen tasks were left alone: their workers are alive, or they no longer run.",
                "count",
            ),
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
            frozenset({"SCHEDULED", "BLOCKED", "READY", "RUNNING"}),
            ngettext_lazy(
                "%(count)d task was cancelled, or asked to end if it runs.",
                "%(count)d tasks were cancelled, or asked to end if they run.",
                "count",
            ),
            lambda rows: rows.cancel(),
        ),
    )
}


def perform(verb: Verb, request: HttpRequest, queryset: Any) -> int:
    """Ask the verb of the rows, say what became of it, and leave one audit entry. Returns how many moved."""
    # Actions of the admin arrive ordered for display; the verb needs the plain set, where it may be written.
    chosen = queryset.using(router.db_for_write(queryset.model)).order_by()
    asked = list(chosen.order_by("-pk").values_list("pk", flat=True)[: pages.MOST_COUNTED + 1])
    is_crowd = len(asked) > WINDOW
    if is_crowd:
        # In one transaction all would wait for the last of them; so the verb commits as it goes. This entry is there
        # also if the process dies on the way.
        record(request, chosen.model, f"{verb.name}: begun with more than {WINDOW}")
    with nullcontext() if is_crowd else transaction.atomic(using=chosen.db):
        count = verb.apply(chosen) if asked else 0
        _audit(verb, request, chosen.model, asked, count)
    if count:
        messages.success(request, verb.done % {"count": count})
    skipped = len(asked) - count
    if len(asked) > pages.MOST_COUNTED:
        text = _("More than %(count)d tasks were chosen; those in another state were left alone.")
        messages.info(request, text % {"count": pages.MOST_COUNTED})
    elif skipped > 0:
        messages.warning(request, verb.left % {"count": skipped})
    elif not count:
        messages.warning(request, _("Nothing of what was chosen is there any more."))
    return count


def _audit(verb: Verb, request: HttpRequest, model: Any, asked: list[int], count: int) -> None:
    text = f"{verb.name}: {count}"
    if 1 < len(asked) <= MOST_NAMED:
        text += f" of {', '.join(f'#{key}' for key in sorted(asked))}"
    # The entry of a single task stands in that task's history too.
    record(request, model, text, object_id=str(asked[0]) if len(asked) == 1 else None)


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
