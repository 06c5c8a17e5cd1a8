"""The arguments of ``locktasks stats``, and its output of the history of attempts."""

from __future__ import annotations

import argparse
import re
from datetime import timedelta
from typing import Any

from django.core.management.base import CommandParser
from django.utils import timezone
from django.utils.translation import gettext as _

from django_pglock.management.choosing import add_functions, add_queues
from django_pglock.management.terminal import printable
from django_pglock.store.numbers import OUTCOMES, Counts, Total, totals

UNITS = {"m": "minutes", "h": "hours", "d": "days"}
#: The shares of attempts whose times are shown.
SHARES = {"p50": 0.5, "p95": 0.95}


def add_stats_filters(parser: CommandParser) -> None:
    """Add the options of ``locktasks stats``."""
    add_queues(parser)
    add_functions(parser)
    # argparse takes -1d for an option and says only that --since expects an argument.
    parser._negative_number_matcher = re.compile(r"-\d")  # noqa: SLF001 - it has no public name
    parser.add_argument(
        "--since",
        type=span,
        default=timedelta(hours=1),
        metavar="SPAN",
        help=_("How far back to look: 15m, 1h or 7d (default: 1h). More than three hours are read by the hour."),
    )
    parser.add_argument("--by-queue", action="store_true", help=_("Add up the functions of each queue."))


def span(text: str) -> timedelta:
    """Return a span of time such as 15m, 1h or 7d. Raises ``ArgumentTypeError``."""
    found = re.fullmatch(r"(\d{1,5})([mhd])", text)
    if not found or not int(found[1]):
        raise argparse.ArgumentTypeError(_("%r is not a span of time such as 15m, 1h or 7d") % text)
    return timedelta(**{UNITS[found[2]]: int(found[1])})


def chosen_totals(using: str, options: dict[str, Any]) -> tuple[list[Total], float]:
    """Return the totals that the options select, and the length of their period in minutes."""
    now, since = timezone.now(), options["since"]
    found = [
        total
        for total in totals(using, now - since, now)
        if (not options["queue"] or total.queue in options["queue"])
        and (not options["task"] or any(_is_named(total.task_path, name) for name in options["task"]))
    ]
    return _by_queue(found) if options["by_queue"] else found, since.total_seconds() / 60


def _by_queue(found: list[Total]) -> list[Total]:
    sums: dict[str, Counts] = {}
    for total in found:
        sums.setdefault(total.queue, Counts()).add(total.counts)
    return [Total(queue, "", counts) for queue, counts in sums.items()]


def total_as_json(total: Total, minutes: float) -> dict[str, Any]:
    """Return a total as values for JSON; times in seconds."""
    counts = total.counts
    return {
        "queue": total.queue,
        "task_path": total.task_path or None,
        **{outcome: getattr(counts, outcome) for outcome in OUTCOMES},
        "per_minute": round(counts.attempts / minutes, 3),
        **{f"wait_{name}": _rounded(counts.wait_quantile(share)) for name, share in SHARES.items()},
        **{f"run_{name}": _rounded(counts.run_quantile(share)) for name, share in SHARES.items()},
    }


def total_as_line(total: Total, minutes: float) -> tuple[str, ...]:
    """Return a total as the cells of a line."""
    counts = total.counts
    return (
        printable(total.queue),
        printable(total.task_path) or "-",
        f"{counts.attempts / minutes:.1f}",
        str(counts.succeeded),
        str(counts.failed),
        str(counts.retried),
        str(counts.cancelled + counts.snoozed + counts.lost),
        *(_seconds(counts.wait_quantile(share)) for share in SHARES.values()),
        *(_seconds(counts.run_quantile(share)) for share in SHARES.values()),
    )


def head_of_totals() -> tuple[str, ...]:
    """Return the heads of the columns of ``total_as_line``."""
    return (
        _("QUEUE"),
        _("TASK"),
        _("PER MINUTE"),
        _("SUCCEEDED"),
        _("FAILED"),
        _("RETRIED"),
        _("OTHER"),
        _("WAIT P50"),
        _("WAIT P95"),
        _("RUN P50"),
        _("RUN P95"),
    )


def _is_named(path: str, name: str) -> bool:
    return path == name or path.endswith(f".{name}")


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.2g} ms" if seconds < 0.01 else f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"
