"""The charts of the overview: the attempts that ended in each minute or hour, and their times, by queue or function.

They are drawn as SVG from plain numbers: bars, and the numbers in a table below. An SVG
contains only shapes, with classes for the stylesheet: no text, which would shrink with the picture on a phone, and no
inline style. Screen readers get the title, and can open the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from django.http import HttpRequest
from django.utils import timezone
from django.utils.formats import date_format
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_pglock.store.numbers import Point, series
from django_pglock.tasks import registry

#: The size of the drawing, in units of its own: the stylesheet stretches it to the width of its column.
WIDTH, HEIGHT = 600.0, 120.0
#: The share of its place that a bar fills, and the height of the smallest bar.
FILLED, SMALLEST = 0.8, 4.0


class Line(NamedTuple):
    """One row of numbers in a chart. ``kind`` is the class of its shapes: ``pglock-chart-<kind>``."""

    label: str
    kind: str
    #: One value for each bucket; None where there is nothing to show.
    values: Sequence[float | None]


@dataclass(frozen=True)
class Chart:
    """Some lines over the same buckets.

    ``moments``: the name of each bucket, such as a time. ``shown`` turns a value into text, with its unit. ``stacked``:
    bars above each other instead of lines.
    """

    name: str
    title: str
    moments: Sequence[str]
    lines: Sequence[Line]
    shown: Callable[[float], str]
    is_stacked: bool = False

    @property
    def top(self) -> float:
        """The value at the upper edge; 0 if all values are 0 or missing."""
        columns: Iterator[Sequence[float | None]] = zip(*(line.values for line in self.lines), strict=True)
        join = sum if self.is_stacked else max
        return max((join(each or 0.0 for each in column) for column in columns), default=0.0)

    @property
    def top_text(self) -> str:
        """The value at the upper edge as text."""
        return self.shown(self.top)

    @property
    def drawing(self) -> SafeString:
        """The SVG."""
        return format_html(
            '<svg class="pglock-chart" viewBox="0 0 {} {}" preserveAspectRatio="none" role="img">'
            "<title>{}</title>{}</svg>",
            *(int(WIDTH), int(HEIGHT), self.title),
            format_html_join("", '<path class="pglock-chart-{}" d="{}"/>', _bars(self)),
        )

    @property
    def rows(self) -> Iterator[tuple[str, list[str]]]:
        """The rows of the table: the moment, and the value of each line."""
        for at, moment in enumerate(self.moments):
            values = [line.values[at] for line in self.lines]
            yield moment, ["-" if value is None else self.shown(value) for value in values]


def _bars(chart: Chart) -> Iterator[tuple[str, str]]:
    """Yield the class and the path of each line: a box for each bucket that has a value."""
    place, scale = WIDTH / max(len(chart.moments), 1), HEIGHT / (chart.top or 1.0)
    width, floor = place * FILLED, [HEIGHT] * len(chart.moments)
    for line in chart.lines:
        boxes = []
        for at, value in enumerate(line.values):
            if value:
                # One failure among thousands can be seen.
                height = max(value * scale, SMALLEST)
                boxes.append(f"M{at * place:.1f} {floor[at]:.1f}h{width:.1f}v{-height:.1f}h{-width:.1f}z")
                floor[at] -= height if chart.is_stacked else 0.0
        yield line.kind, "".join(boxes)


class Span(NamedTuple):
    """How far the charts look back, in which steps, and how a moment is written."""

    name: str
    label: Any
    length: timedelta
    step: timedelta
    moment: str


#: There are rows of minutes and of hours, so each point of a chart is one row of each kind.
SPANS = (
    Span("hour", gettext_lazy("Hour, by the minute"), timedelta(hours=1), timedelta(minutes=1), "H:i"),
    Span("day", gettext_lazy("Day, by the hour"), timedelta(days=1), timedelta(hours=1), "H:i"),
    Span("week", gettext_lazy("Week, by the hour"), timedelta(days=7), timedelta(hours=1), "D H:i"),
)


def choice_of(request: HttpRequest, queues: Iterable[str]) -> dict[str, Any]:
    """Return the choice of a request, and what else can be chosen. An unknown span is an hour."""
    asked = {name: request.GET.get(name, "") for name in ("span", "queue", "task_path")}
    span = next((each for each in SPANS if each.name == asked["span"]), SPANS[0])
    known = sorted({*queues, *filter(None, [asked["queue"]])})
    paths = sorted({*registry.known_paths(), *filter(None, [asked["task_path"]])})
    return {**asked, "span": span, "spans": SPANS, "queues": known, "task_paths": paths}


def charts_of(using: str, choice: dict[str, Any]) -> list[Chart]:
    """Return the charts: finished tasks, failed attempts, wait and run time. One statement."""
    now, span = timezone.now(), choice["span"]
    points = series(using, now - span.length, now, span.step, choice["queue"] or None, choice["task_path"] or None)
    counts = [point.counts for point in points]
    moments = [_moment(point, span) for point in points]

    finished = (
        Line(_("succeeded"), "good", [each.succeeded for each in counts]),
        Line(_("failed"), "bad", [each.failed for each in counts]),
    )
    failures = (
        Line(_("the last of their task"), "bad", [each.failed for each in counts]),
        Line(_("retried"), "warn", [each.retried for each in counts]),
    )
    return [
        Chart("finished", _("Finished tasks"), moments, finished, whole, is_stacked=True),
        Chart("failures", _("Failed attempts"), moments, failures, whole, is_stacked=True),
        Chart("wait", _("Time from ready to started"), moments, _quantiles(counts, "wait_quantile"), duration),
        Chart("run", _("Run time"), moments, _quantiles(counts, "run_quantile"), duration),
    ]


def whole(value: float) -> str:
    """Return a count as people read it."""
    return f"{value:,.0f}"


def duration(seconds: float) -> str:
    """Return seconds as people read them, with a unit."""
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def _quantiles(counts: Sequence[Any], name: str) -> list[Line]:
    shares = (("p95", "most", 0.95), ("p50", "half", 0.5))
    return [Line(label, kind, [getattr(each, name)(share) for each in counts]) for label, kind, share in shares]


def _moment(point: Point, span: Span) -> str:
    at: datetime = point.started_at
    return str(date_format(timezone.localtime(at) if timezone.is_aware(at) else at, span.moment))
