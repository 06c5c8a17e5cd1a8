"""Which tasks a command is about: ids or filters, as arguments and as a queryset."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.db.models import Q
from django.db.models.functions import Now
from django.utils.translation import gettext as _

from django_pglock.conf import MOST_DAYS
from django_pglock.tasks.states import TaskStatus


def add_filters(parser: CommandParser) -> None:
    """Add the filters."""
    parser.add_argument(
        "--queue", action="append", type=plain_text, metavar="NAME", help=_("Of this queue. May be given again.")
    )
    parser.add_argument(
        "--task",
        action="append",
        type=plain_text,
        metavar="FUNCTION",
        help=_("Of this function: its path, or its name alone. May be given again."),
    )
    add_statuses(parser, TaskStatus.values)
    parser.add_argument(
        "--older-than", type=days, metavar="DAYS", help=_("Enqueued more than so many days ago; 0.5 is twelve hours.")
    )


def add_statuses(parser: CommandParser, statuses: Sequence[str]) -> None:
    """Add the filter by status."""
    parser.add_argument(
        "--status",
        action="append",
        type=str.upper,
        choices=statuses,
        metavar="STATUS",
        help=_("In this status: %s. May be given again.") % ", ".join(statuses),
    )


def add_choice(parser: CommandParser) -> None:
    """Add what a verb may be told: ids or filters, and how to go about it."""
    parser.add_argument("ids", nargs="*", type=task_id, metavar="ID", help=_("These tasks."))
    add_filters(parser)
    parser.add_argument("--all", action="store_true", help=_("All tasks for which the verb means anything."))
    parser.add_argument("--yes", action="store_true", help=_("Do not ask."))
    parser.add_argument("--dry-run", action="store_true", help=_("Only say how many tasks that would be."))


def filtered(rows: Any, options: dict[str, Any]) -> Any:
    """Return the tasks that the filters leave."""
    if options["queue"]:
        rows = rows.filter(queue__in=options["queue"])
    if options["status"]:
        rows = rows.filter(status__in=options["status"])
    if options["older_than"] is not None:
        rows = rows.filter(enqueued_at__lt=Now() - timedelta(days=options["older_than"]))
    if options["task"]:
        named = Q(task_path__in=options["task"])
        for name in options["task"]:
            named |= Q(task_path__endswith=f".{name}")
        rows = rows.filter(named)
    return rows


def chosen(rows: Any, options: dict[str, Any]) -> Any:
    """Return the tasks that were chosen. Raises ``CommandError`` if none were, or in two ways."""
    has_filters = any(options[name] for name in ("queue", "task", "status")) or options["older_than"] is not None
    if options["ids"]:
        if has_filters or options["all"]:
            raise CommandError(_("Give ids or filters, not both."))
        return rows.filter(pk__in=options["ids"])
    if has_filters and options["all"]:
        raise CommandError(_("Give filters or --all, not both."))
    if not has_filters and not options["all"]:
        raise CommandError(
            _("Which tasks? Give ids, filters (--queue, --task, --status, --older-than), or --all for all of them.")
        )
    return filtered(rows, options)


def days(text: str) -> float:
    """Return a number of days. Raises ``ArgumentTypeError``."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= MOST_DAYS:
        raise argparse.ArgumentTypeError(_("%r is no number of days") % text)
    return number


def plain_text(value: str) -> str:
    """Return a text. Raises ``ArgumentTypeError`` for bytes that the terminal's encoding has no character for."""
    if not value.isprintable() and any("\ud800" <= each <= "\udfff" for each in value):
        raise argparse.ArgumentTypeError(_("%r is no text in this terminal's encoding") % value)
    return value


def task_id(text: str) -> int:
    """Return the id of a task. Raises ``ArgumentTypeError`` for what cannot be one."""
    if not (text.isascii() and text.isdigit() and int(text) < 2**63):
        raise argparse.ArgumentTypeError(_("%r is no id of a task") % text)
    return int(text)
