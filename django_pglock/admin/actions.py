"""Actions and buttons: each applies one verb, shows a message and writes to the admin log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.contrib import admin, messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.db import router, transaction
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.html import format_html
from django.utils.translation import gettext as _

from django_pglock.errors import ConfigurationError
from django_pglock.store.bulk import enqueue_change
from django_pglock.store.operate import Verb
from django_pglock.store.statements import WINDOW

#: A log entry lists the ids of at most this number of tasks.
MOST_NAMED = 100


def perform(verb: Verb, request: HttpRequest, queryset: Any, value: str = "") -> None:
    """Apply the verb to the rows, show a message and write a log entry.

    More rows than ``WINDOW`` are changed by a task, because a request may not take that long.
    """
    # The admin passes a queryset in display order, possibly on a replica. The verb needs an unordered one on the
    # database that takes writes.
    chosen = queryset.using(router.db_for_write(queryset.model)).order_by()
    asked = list(chosen.order_by("-pk").values_list("pk", flat=True)[: WINDOW + 1])
    with transaction.atomic(using=chosen.db):
        if len(asked) > WINDOW:
            _perform_by_task(verb, request, chosen, value)
            return
        remark = verb.remark(chosen) if asked else ""
        count = verb.apply(chosen, value) if asked else 0
        _audit(f"{verb.name} {value}".strip(), request, chosen.model, asked, count)
    if count:
        messages.success(request, verb.message(verb.done, count))
        if remark:
            messages.warning(request, remark)
    if len(asked) > count:
        messages.warning(request, verb.message(verb.unchanged, len(asked) - count))
    elif not asked:
        messages.warning(request, _("The selected rows no longer exist."))


def _perform_by_task(verb: Verb, request: HttpRequest, chosen: Any, value: str) -> None:
    ids = verb.ids(chosen, value)
    try:
        made = enqueue_change(chosen.db, verb, ids, value)
    except ConfigurationError as error:
        messages.error(request, str(error))
        return
    numbers = ", ".join(f"#{each}" for each in made)
    name = f"{verb.name} {value}".strip()
    record(request, chosen.model, f"{name}: asked for {len(ids)} tasks, to be changed by {numbers}")
    if not made:
        messages.warning(request, verb.message(verb.unchanged, WINDOW + 1, most=WINDOW))
    for each in made:
        url = reverse("admin:django_pglock_task_change", args=[each], current_app=getattr(request, "current_app", None))
        link = format_html('<a href="{}">#{}</a>', url, each)
        text = _("A worker does this in the background, for {count} tasks. Progress, and a button to cancel: {link}")
        messages.info(request, format_html(text, count=len(ids), link=link))


def _audit(name: str, request: HttpRequest, model: Any, asked: list[int], count: int) -> None:
    text = f"{name}: {count}"
    if 1 < len(asked) <= MOST_NAMED:
        text += f" of {', '.join(f'#{key}' for key in sorted(asked))}"
    # With an object id the entry also appears in the history of that task.
    record(request, model, text, object_id=str(asked[0]) if len(asked) == 1 else None)


def record(request: HttpRequest, model: Any, text: str, *, object_id: str | None = None, flag: int = CHANGE) -> None:
    """Write one entry to the admin log, for any number of rows."""
    LogEntry.objects.create(
        user_id=request.user.pk or 0,
        content_type=ContentType.objects.get_for_model(model, for_concrete_model=False),
        object_id=object_id,
        object_repr=text[:200],
        action_flag=flag,
        change_message=text,
    )


def value_of(request: HttpRequest) -> str:
    """Return the value that a user has typed for a verb."""
    # PostgreSQL cannot store a NUL character in text.
    return request.POST.get("value", "").strip().replace("\x00", "")


def admin_action(verb: Verb) -> Callable[..., HttpResponse | None]:
    """Return the verb as an action of a list page."""

    def action(model_admin: Any, request: HttpRequest, queryset: Any) -> HttpResponse | None:
        # Without statuses it is not a verb of tasks: the rows are few, and change back as easily.
        is_across_pages = request.POST.get("select_across") == "1" and verb.statuses
        if (is_across_pages or verb.takes_queue) and "confirmed" not in request.POST:
            answer: HttpResponse = model_admin.question(request, verb, queryset)
            return answer
        try:
            verb.check(router.db_for_write(queryset.model), value_of(request))
        except ValueError as error:
            messages.error(request, str(error))
            return None
        model_admin.perform(verb, request, queryset, value_of(request))
        return None

    action.__name__ = verb.name
    return admin.action(description=verb.label, permissions=[verb.permission])(action)


def question_of(verb: Verb, rows: Any) -> dict[str, Any]:
    """Return what a page shows before it asks whether a verb may change these rows."""
    count = verb.movable(rows).count()
    return {
        "question": verb.message(verb.question, count),
        "remark": verb.remark(rows),
        "exceeds_window": count > WINDOW,
    }
