"""The selection of tasks on a command line: ids or filters, as arguments and as a queryset."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from datetime import timedelta
from typing import Any

from django.core.management.base import CommandParser
from django.db.models import Q
from django.db.models.functions import Now
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_pglock.conf import MOST_DAYS
from django_pglock.management.arguments import WrongArguments, number
from django_pglock.store.operate import check_target
from django_pglock.tasks import registry
from django_pglock.tasks.states import TaskStatus

#: The id of a task, and other numbers that PostgreSQL calls ``bigint``.
ID = number(int, 0, 2**63 - 1)
DAYS = number(float, 0, MOST_DAYS)

#: The options that filter tasks and failures: the name of their value, its type, and their help.
FILTERS: dict[str, tuple[str | None, Callable[[str], Any], Any]] = {
    "--queue": ("NAME", str, gettext_lazy("Only tasks of this queue. Can be repeated.")),
    "--task": (
        "FUNCTION",
        str,
        gettext_lazy("Only tasks of this function: its path, or its name without the module. Can be repeated."),
    ),
    "--status": (None, str.upper, gettext_lazy("Only tasks in this status. Can be repeated.")),
    "--older-than": (
        "DAYS",
        DAYS,
        gettext_lazy("Only tasks enqueued more than DAYS days ago; 0.5 is twelve hours."),
    ),
    "--fingerprint": ("NUMBER", ID, gettext_lazy("Only the group of failures with this number. Can be repeated.")),
    "--exception": (
        "CLASS",
        str,
        gettext_lazy("Only failures with this exception: its path, or its name without the module. Can be repeated."),
    ),
}
#: The filters of tasks, and those of groups of failures.
OF_TASKS = ("--queue", "--task", "--status", "--older-than")
OF_FAILURES = ("--fingerprint", "--task", "--exception")


def add_filters(parser: CommandParser, *options: str) -> None:
    """Add some of the options that filter."""
    for option in options:
        metavar, read, text = FILTERS[option]
        action = "store" if option == "--older-than" else "append"
        choices = TaskStatus.values if option == "--status" else None
        parser.add_argument(option, action=action, metavar=metavar, type=read, choices=choices, help=str(text))


def add_choice(parser: CommandParser) -> None:
    """Add the arguments that select the tasks of a verb."""
    parser.add_argument("ids", nargs="*", type=ID, metavar="ID", help=_("The id of a task."))
    add_filters(parser, *OF_TASKS)
    parser.add_argument("--all", action="store_true", help=_("All tasks that can be changed in this way."))
    add_questions(parser)


def add_questions(parser: CommandParser) -> None:
    """Add the options --yes and --dry-run."""
    parser.add_argument("--yes", action="store_true", help=_("Do not ask for confirmation."))
    add_dry_run(parser)


def add_dry_run(parser: CommandParser) -> None:
    """Add the option --dry-run."""
    text = _("Print how many tasks would be changed, and change nothing.")
    parser.add_argument("--dry-run", action="store_true", help=text)


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


def is_named(path: str, names: Collection[str] | None) -> bool:
    """Return whether one of the names is this path or its end. Without names, everything is."""
    return not names or any(f".{path}".endswith(f".{name}") for name in names)


def doubts(using: str, options: dict[str, Any]) -> Iterator[str]:
    """Yield which names of the filters are perhaps typing errors: "0 tasks" alone would not say so."""
    for queue in options.get("queue") or ():
        try:
            check_target(using, queue)
        except ValueError as error:  # noqa: PERF203 - there are few names
            yield str(error)
    known = {name for path in registry.known_paths() for name in (path, path.rpartition(".")[2])}
    for name in options.get("task") or ():
        if name not in known:
            yield _("This process knows no task function %r.") % name


def chosen(rows: Any, options: dict[str, Any]) -> Any:
    """Return the selected tasks.

    Raises ``WrongArguments`` unless there is one of these: ids, filters or --all.
    """
    has_filters = any(options[name] for name in ("queue", "task", "status")) or options["older_than"] is not None
    if sum(map(bool, (options["ids"], has_filters, options["all"]))) != 1:
        raise WrongArguments(
            _("Select tasks by one of these: ids, filters (--queue, --task, --status, --older-than) or --all.")
        )
    return rows.filter(pk__in=options["ids"]) if options["ids"] else filtered(rows, options)
