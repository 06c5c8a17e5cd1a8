"""``manage.py locktasks failures`` and ``redrive``: the groups of failed tasks, and retrying whole groups."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.utils.translation import gettext as _

from django_pglock.errors import ConfigurationError
from django_pglock.management.arguments import WrongArguments
from django_pglock.management.choosing import add_name_option
from django_pglock.management.terminal import ago, aligned, printable
from django_pglock.store.bulk import HIGHEST_RATE, LOWEST_RATE, enqueue_redrive
from django_pglock.store.failures import MOST_FOUND, FailureCounts, failures
from django_pglock.store.id_range import id_in


def add_group_filters(parser: CommandParser) -> None:
    """Add the options that select groups of failures."""
    parser.add_argument(
        "--fingerprint",
        action="append",
        type=_fingerprint,
        metavar="NUMBER",
        help=_("Only the group of failures with this number. Can be repeated."),
    )
    text = _("Only failures of this function: its path, or its name without the module.")
    add_name_option(parser, "--task", "FUNCTION", text, dest="function")
    text = _("Only failures with this exception: the path of its class, or its name without the module.")
    add_name_option(parser, "--exception", "CLASS", text)


def add_redrive(parser: CommandParser) -> None:
    """Add the options of ``redrive``."""
    add_group_filters(parser)
    parser.add_argument(
        "--rate",
        type=_rate,
        metavar="N",
        help=_("Retry at most N tasks of a group a second, in the background. Default: all at once, by this command."),
    )
    parser.add_argument("--yes", action="store_true", help=_("Do not ask for confirmation."))
    parser.add_argument(
        "--dry-run", action="store_true", help=_("Print how many tasks would be changed, and change nothing.")
    )


def chosen_groups(rows: Any, options: dict[str, Any]) -> list[FailureCounts]:
    """Return the groups that match the options."""
    numbers, function, exception = options["fingerprint"], options["function"], options["exception"]
    return [
        group
        for group in failures(rows.db, limit=MOST_FOUND)
        if (not numbers or group.fingerprint in numbers)
        and (function is None or function in (group.task_path, group.name))
        and (exception is None or exception in (group.exception_path, group.exception))
    ]


def redriven_groups(rows: Any, options: dict[str, Any]) -> list[int]:
    """Return the fingerprints of the groups that match the options. Raises ``WrongArguments`` if there is no option."""
    if not (options["fingerprint"] or options["function"] is not None or options["exception"] is not None):
        raise WrongArguments(_("No failures are selected. Give --fingerprint, --task or --exception."))
    return [each.fingerprint for each in chosen_groups(rows, options)]


def enqueue_redrives(using: str, groups: list[int], rate: float) -> Iterator[str]:
    """Enqueue tasks that retry these groups at a rate. Yield a sentence about each."""
    for group in groups:
        try:
            made, is_new = enqueue_redrive(using, group, rate)
        except (ConfigurationError, ValueError) as error:
            raise CommandError(str(error)) from error
        text = _("Task %(id)d retries the failures of group %(group)d. To stop it: manage.py locktasks cancel %(id)d")
        if not is_new:
            text = _("Task %(id)d retries the failures of group %(group)d already. Cancel it to change the rate.")
        yield text % {"id": made, "group": group}


def groups_as_table(groups: list[FailureCounts]) -> str:
    """Return the table of groups, or the sentence that there are none."""
    if not groups:
        return _("No task has failed.")
    head = (_("FINGERPRINT"), _("FAILED"), _("LAST"), _("TASK"), _("EXCEPTION"), _("PLACE"))
    lines = [
        (
            *(str(group.fingerprint), f"{group.count}{'+' if group.is_capped else ''}"),
            *(_("%s ago") % ago(group.last_at), printable(group.task_path), printable(group.exception_path) or "-"),
            printable(group.place) or "-",
        )
        for group in groups
    ]
    return "\n".join(aligned(head, lines))


def _fingerprint(text: str) -> int:
    if (number := id_in(text)) is None:
        raise argparse.ArgumentTypeError(_("%r is not a fingerprint; run: manage.py locktasks failures") % text)
    return number


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0
    if not LOWEST_RATE <= rate <= HIGHEST_RATE:
        known = {"rate": text, "lowest": f"{LOWEST_RATE:g}", "highest": f"{HIGHEST_RATE:g}"}
        raise argparse.ArgumentTypeError(
            _("%(rate)r is not a rate from %(lowest)s to %(highest)s tasks a second") % known
        )
    return rate
