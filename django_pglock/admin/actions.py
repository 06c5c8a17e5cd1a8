"""Actions and buttons: each applies one verb, shows a message and writes to the admin log."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from django.contrib import admin, messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.db import router, transaction
from django.http import HttpRequest
from django.utils.translation import gettext as _

from django_pglock.admin import pages
from django_pglock.store.move import WINDOW
from django_pglock.verbs import Verb

#: A log entry lists the ids of at most this number of tasks.
MOST_NAMED = 100


def perform(verb: Verb, request: HttpRequest, queryset: Any) -> int:
    """Apply the verb to the rows, show a message and write a log entry. Return the number of changed rows."""
    # The admin passes a queryset in display order, possibly on a replica. The verb needs an unordered one on the
    # database that takes writes.
    chosen = queryset.using(router.db_for_write(queryset.model)).order_by()
    asked = list(chosen.order_by("-pk").values_list("pk", flat=True)[: pages.MOST_COUNTED + 1])
    is_crowd = len(asked) > WINDOW
    if is_crowd:
        # One transaction would keep all rows locked until the last one is changed, so the verb commits each window of
        # rows. This first entry exists even if the process dies before the verb is done.
        record(request, chosen.model, f"{verb.name}: started for more than {WINDOW} rows")
    with nullcontext() if is_crowd else transaction.atomic(using=chosen.db):
        count = verb.apply(chosen, None) if asked else 0
        _audit(verb, request, chosen.model, asked, count)
    if count:
        messages.success(request, verb.said(verb.done, count))
    skipped = len(asked) - count
    if len(asked) > pages.MOST_COUNTED:
        text = _("More than %(count)d tasks were selected. Tasks in other states were not changed.")
        messages.info(request, text % {"count": pages.MOST_COUNTED})
    elif skipped > 0:
        messages.warning(request, verb.said(verb.left, skipped))
    elif not count:
        messages.warning(request, _("The selected rows no longer exist."))
    return count


def _audit(verb: Verb, request: HttpRequest, model: Any, asked: list[int], count: int) -> None:
    text = f"{verb.name}: {count}"
    if 1 < len(asked) <= MOST_NAMED:
        text += f" of {', '.join(f'#{key}' for key in sorted(asked))}"
    # With an object id the entry also appears in the history of that task.
    record(request, model, text, object_id=str(asked[0]) if len(asked) == 1 else None)


def record(request: HttpRequest, model: Any, text: str, *, object_id: str | None = None) -> None:
    """Write one entry to the admin log, for any number of rows."""
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
    return admin.action(description=verb.label, permissions=[verb.permission])(action)
