"""The selection of tasks on a command line: ids or filters, as arguments and as a queryset."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

from django.core.management.base import CommandParser
from django.db.models import Q
from django.db.models.functions import Now
from django.utils.translation import gettext as _

from django_pglock.conf import MOST_DAYS
from django_pglock.management.arguments import WrongArguments
from django_pglock.store.id_range import id_in
from django_pglock.store.operate import check_target
from django_pglock.tasks import registry
from django_pglock.tasks.states import TaskStatus


def add_filters(parser: CommandParser) -> None:
    """Add the options that filter tasks."""
    add_queues(parser)
    add_functions(parser)
    add_statuses(parser, TaskStatus.values)
    parser.add_argument(
        "--older-than",
        type=days,
        metavar="DAYS",
        help=_("Only tasks enqueued more than DAYS days ago; 0.5 is twelve hours."),
    )


def add_name_option(parser: CommandParser, option: str, metavar: str, text: str, **others: Any) -> None:
    """Add an option that takes the name of a queue, a function or an exception."""
    parser.add_argument(option, type=plain_text, metavar=metavar, help=text, **others)


def add_queues(parser: CommandParser) -> None:
    """Add the option that filters tasks by queue."""
    add_name_option(parser, "--queue", "NAME", _("Only tasks of this queue. Can be repeated."), action="append")


def add_functions(parser: CommandParser) -> None:
    """Add the option that filters tasks by function."""
    text = _("Only tasks of this function: its path, or its name without the module. Can be repeated.")
    add_name_option(parser, "--task", "FUNCTION", text, action="append")


def add_statuses(parser: CommandParser, statuses: Sequence[str]) -> None:
    """Add the option that filters tasks by status."""
    parser.add_argument(
        "--status",
        action="append",
        type=str.upper,
        choices=statuses,
        metavar="STATUS",
        help=_("Only tasks in this status: %s. Can be repeated.") % ", ".join(statuses),
    )


def add_choice(parser: CommandParser) -> None:
    """Add the arguments that select the tasks of a verb, and the options --yes and --dry-run."""
    parser.add_argument("ids", nargs="*", type=task_id, metavar="ID", help=_("The id of a task."))
    add_filters(parser)
    parser.add_argument("--all", action="store_true", help=_("All tasks that can be changed in this way."))
    parser.add_argument("--yes", action="store_true", help=_("Do not ask for confirmation."))
    parser.add_argument(
        "--dry-run", action="store_true", help=_("Print how many tasks would be changed, and change nothing.")
    )


def filtered(rows: Any, options: dict[str, Any]) -> Any:
    """Return the tasks that match the filters."""
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


def doubts(using: str, options: dict[str, Any]) -> Iterator[str]:
    """Yield which names of the filters are perhaps typing errors: "0 tasks" alone would not say so."""
    names = options.get("queue")
    if isinstance(names, list):
        yield from filter(None, (_doubt(using, queue) for queue in names))
    known = {name for path in registry.known_paths() for name in (path, path.rpartition(".")[2])}
    for name in options.get("task") or ():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = _(" Did you mean %r?") % near[0] if near else ""
            yield _("This process knows no task function %r.") % name + hint


def _doubt(using: str, queue: str) -> str:
    try:
        check_target(using, queue)
    except ValueError as error:
        return str(error)
    return ""


def chosen(rows: Any, options: dict[str, Any]) -> Any:
    """Return the selected tasks.

    Raises ``WrongArguments`` if there are neither ids nor filters nor --all, or more than one of these.
    """
    has_filters = any(options[name] for name in ("queue", "task", "status")) or options["older_than"] is not None
    if options["ids"]:
        if has_filters or options["all"]:
            raise WrongArguments(_("Give ids or filters, not both."))
        return rows.filter(pk__in=options["ids"])
    if has_filters and options["all"]:
        raise WrongArguments(_("Give filters or --all, not both."))
    if not has_filters and not options["all"]:
        raise WrongArguments(
            _("No tasks are selected. Give ids, filters (--queue, --task, --status, --older-than) or --all.")
        )
    return filtered(rows, options)


def days(text: str) -> float:
    """Return a number of days. Raises ``ArgumentTypeError``."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= MOST_DAYS:
        raise argparse.ArgumentTypeError(_("%r is not a number of days") % text)
    return number


def plain_text(value: str) -> str:
    """Return the text. Raises ``ArgumentTypeError`` for bytes that are invalid in the encoding of the terminal."""
    if not value.isprintable() and any("\ud800" <= each <= "\udfff" for each in value):
        raise argparse.ArgumentTypeError(_("%r is not valid text in the encoding of the terminal") % value)
    return value


def task_id(text: str) -> int:
    """Return the id of a task. Raises ``ArgumentTypeError`` for a text that cannot be one."""
    if (number := id_in(text)) is None:
        raise argparse.ArgumentTypeError(_("%r is not the id of a task") % text)
    return number
