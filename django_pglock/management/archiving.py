"""The arguments of ``locktasks archive``, and its work."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import date
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.template.defaultfilters import filesizeformat
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from django_pglock.errors import ConfigurationError
from django_pglock.management.arguments import WrongArguments
from django_pglock.management.tables import duration_text
from django_pglock.models import Worker
from django_pglock.store.archive import AGE, movable
from django_pglock.store.archive_days import DaySize, sizes_of_days
from django_pglock.store.archive_state import (
    UNTIL_FIRST_MOVE,
    ArchiveState,
    archive_state,
    existing_archive,
    turn_off,
    turn_on,
)
from django_pglock.store.count import MOST_COUNTED
from django_pglock.store.prune import DAY, ages_of, first_id_since
from django_pglock.store.restore import restore

#: Seconds between two lines of progress.
BETWEEN_LINES = 2.0

Say = Callable[[str], Any]


def add_options(parser: CommandParser) -> None:
    """Add the arguments: what to do, and whether to wait for the tasks that are old enough already."""
    parser.add_argument(
        "what",
        choices=("on", "off", "status", "restore"),
        help=_(
            "on: workers move successful tasks. off: they stop. status: what is in the archive. restore: moves all "
            "tasks of the archive back, after off."
        ),
    )
    parser.add_argument(
        "--wait", action="store_true", help=_("With on: print the progress until the present tasks have been moved.")
    )


def archive(using: str, options: dict[str, Any], *, say: Say) -> None:
    """Turn the archive on or off, print what is in it, or move its tasks back."""
    if options["wait"] and options["what"] != "on":
        raise WrongArguments(_("--wait needs on: manage.py locktasks archive on --wait"))
    try:
        if options["what"] == "on":
            _turn_on(using, say)
            if options["wait"]:
                _wait(using, say)
        elif options["what"] == "off":
            _turn_off(using, say)
        elif options["what"] == "restore":
            _restore(using, say)
        else:
            for line in _status(using, existing_archive(using)):
                say(line)
    except ConfigurationError as error:
        raise CommandError(str(error)) from None


def dropped_text(days: int, *, is_dry: bool) -> str:
    """Return the message of ``prune`` about a number of days of the archive."""
    if is_dry:
        text = ngettext("%d day of the archive would be dropped.", "%d days of the archive would be dropped.", days)
    else:
        text = ngettext("%d day of the archive was dropped.", "%d days of the archive were dropped.", days)
    return text % days


def _turn_on(using: str, say: Say) -> None:
    if not turn_on(using):
        say(_("The archive is on already."))
        return
    text = _("The archive is on. In %d seconds workers begin to move successful tasks that ended at least an hour ago.")
    say(text % UNTIL_FIRST_MOVE)
    say(_retention_text())


def _turn_off(using: str, say: Say) -> None:
    if not turn_off(using):
        raise CommandError(_("The archive is not on."))
    say(_("The archive is off: workers move no more tasks. Its days stay until they are old enough to be dropped."))


def _restore(using: str, say: Say) -> None:
    def progress(day: date, count: int) -> None:
        text = ngettext(
            "%(count)d task of %(day)s was moved back.", "%(count)d tasks of %(day)s were moved back.", count
        )
        say(text % {"count": count, "day": day})

    moved, left = restore(using, progress=progress)
    if left:
        text = ngettext(
            "%s task is still in the archive: its row is locked, or another task has its id.",
            "%s tasks are still in the archive: their rows are locked, or other tasks have their ids.",
            left,
        )
        raise CommandError(text % (f"{MOST_COUNTED}+" if left > MOST_COUNTED else left))
    if not moved:
        say(_("There is no task in the archive."))


def _retention_text() -> str:
    days = _age()
    if days is None:
        return _("PRUNE_AFTER keeps SUCCESSFUL tasks forever, so no day of the archive is ever dropped.")
    if days * DAY <= AGE:
        return _("PRUNE_AFTER deletes SUCCESSFUL tasks within an hour, before they would be moved. Nothing is moved.")
    return _("A day is dropped when all its tasks are older than %g days, as PRUNE_AFTER says.") % days


def _age() -> float | None:
    return ages_of().get("SUCCESSFUL")


def _status(using: str, state: ArchiveState) -> list[str]:
    lines = [
        _("The archive is off.")
        if state.on_for is None
        else _("The archive has been on for %s.") % duration_text(state.on_for)
    ]
    days = sizes_of_days(using)
    lines.append(_size_text(days) if days else _("There is no task in it."))
    if state.is_on:
        lines.append(_remaining_text(using))
    if state.is_on or days:
        lines.append(_retention_text())
    return lines


def _size_text(days: list[DaySize]) -> str:
    text = ngettext(
        "It has %(days)d day with about %(rows)s tasks, in %(size)s; the oldest is %(oldest)s.",
        "It has %(days)d days with about %(rows)s tasks, in %(size)s; the oldest is %(oldest)s.",
        len(days),
    )
    return text % {
        "days": len(days),
        "rows": f"{sum(each.rows for each in days):,}",
        "size": filesizeformat(sum(each.size for each in days)).replace("\xa0", " "),
        "oldest": days[0].day,
    }


def _remaining_text(using: str) -> str:
    count = movable(using, _age())[: MOST_COUNTED + 1].count()
    if not count:
        return _("All tasks that are old enough have been moved.")
    text = ngettext("%s task is still to be moved.", "%s tasks are still to be moved.", count)
    return text % (f"{MOST_COUNTED}+" if count > MOST_COUNTED else count)


def _wait(using: str, say: Say) -> None:
    """Print the progress until the tasks that are old enough now have been moved. An interrupt ends only the wait."""
    days, last, after, said = _age(), first_id_since(using, AGE), 0, 0
    try:
        while (first := _first(using, days, after, last)) is not None:
            if first != said:
                say(_("Moved up to id %(first)d of %(last)d …") % {"first": first - 1, "last": last - 1})
            after, said = first - 1, first
            if not archive_state(using).is_on:
                raise CommandError(_("The archive was turned off meanwhile."))
            if not Worker.objects.using(using).alive().exists():
                say(_("No worker is alive. Start one: manage.py runlockworker"))
            time.sleep(BETWEEN_LINES)
    except KeyboardInterrupt:
        say(_("Workers continue to move tasks. To see how far they are: manage.py locktasks archive status"))
    else:
        say(_("All tasks that were old enough have been moved."))


def _first(using: str, days: float | None, after: int, last: int) -> int | None:
    """Return the first task behind ``after`` that is to be moved."""
    found = movable(using, days).filter(pk__gt=after, pk__lt=last).values_list("pk", flat=True)
    return next(iter(found[:1]), None)
