"""The charts of the overview: the attempts that ended in each minute or hour, and their times, by queue or function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.http import HttpRequest
from django.utils import timezone
from django.utils.formats import date_format
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_pglock.admin.charts import Chart, Line
from django_pglock.admin.overview_facts import Facts
from django_pglock.store.numbers import Point, series
from django_pglock.tasks import registry


@dataclass(frozen=True)
class Span:
    """How far the charts look back, in which steps, and how a moment is written."""

    name: str
    label: Any
    length: timedelta
    step: timedelta
    moment: str


#: There are rows of minutes and of hours, so each point of a chart is one row of each kind.
SPANS = (
    Span("hour", gettext_lazy("Hour"), timedelta(hours=1), timedelta(minutes=1), "H:i"),
    Span("day", gettext_lazy("Day"), timedelta(days=1), timedelta(hours=1), "H:i"),
    Span("week", gettext_lazy("Week"), timedelta(days=7), timedelta(hours=1), "D H:i"),
)


@dataclass(frozen=True)
class Choice:
    """The choice in the query string, and the other choices of a user."""

    span: Span
    queue: str
    task_path: str
    queues: Sequence[str]
    task_paths: Sequence[str]
    spans: Sequence[Span] = SPANS


def choice_of(request: HttpRequest, facts: Facts, queues: Sequence[str]) -> Choice:
    """Return the choice of a request. An unknown span is an hour."""
    # PostgreSQL cannot store a NUL character in text.
    asked = {name: request.GET.get(name, "").replace("\x00", "") for name in ("span", "queue", "task_path")}
    span = next((each for each in SPANS if each.name == asked["span"]), SPANS[0])
    known = sorted({*queues, *facts.ages, *facts.paused, *filter(None, [asked["queue"]])})
    paths = sorted({*registry.known_paths(), *filter(None, [asked["task_path"]])})
    return Choice(span, asked["queue"], asked["task_path"], known, paths)


def charts_of(facts: Facts, choice: Choice) -> list[Chart]:
    """Return the charts: finished tasks, failed attempts, wait and run time. One statement."""
    now, span = timezone.now(), choice.span
    queue, path = choice.queue or None, choice.task_path or None
    points = series(facts.using, now - span.length, now, span.step, queue, path)
    counts = [point.counts for point in points]
    moments = [_moment(point, span) for point in points]

    def bars(name: str, title: str, *lines: Line) -> Chart:
        return Chart(name, title, moments, lines, lambda value: f"{value:,.0f}", stacked=True)

    def curves(name: str, title: str, *lines: Line) -> Chart:
        return Chart(name, title, moments, lines, duration)

    is_by_minute = span.step == timedelta(minutes=1)
    return [
        bars(
            "finished",
            _("Finished tasks per minute") if is_by_minute else _("Finished tasks per hour"),
            Line(_("succeeded"), "good", [each.succeeded for each in counts]),
            Line(_("failed"), "bad", [each.failed for each in counts]),
        ),
        bars(
            "failures",
            _("Failed attempts per minute") if is_by_minute else _("Failed attempts per hour"),
            Line(_("the last of their task"), "bad", [each.failed for each in counts]),
            Line(_("retried"), "warn", [each.retried for each in counts]),
        ),
        curves("wait", _("Time from ready to started"), *_quantiles([each.wait_quantile for each in counts])),
        curves("run", _("Run time"), *_quantiles([each.run_quantile for each in counts])),
    ]


def duration(seconds: float) -> str:
    """Return seconds as people read them, with a unit."""
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def _quantiles(quantiles: Sequence[Any]) -> tuple[Line, Line]:
    return (
        Line("p50", "half", [quantile(0.5) for quantile in quantiles]),
        Line("p95", "most", [quantile(0.95) for quantile in quantiles]),
    )


def _moment(point: Point, span: Span) -> str:
    at: datetime = point.started_at
    return str(date_format(timezone.localtime(at) if timezone.is_aware(at) else at, span.moment))
