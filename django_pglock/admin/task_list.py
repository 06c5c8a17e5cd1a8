"""The list of tasks and its export, for tables of ten million rows. Each filter names its index; the rest follows.

``Reading`` chooses the index by the filters of a request. If the index serves all of them, the list counts its rows, up
to a limit. Otherwise the list counts nothing: it searches only the newest tasks of that index, in its order. So no
filter reads the whole table, neither for its choices nor for its matches.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial, reduce
from itertools import islice
from operator import or_
from typing import Any
from uuid import UUID

from django.conf import settings
from django.contrib import admin, messages
from django.contrib.admin.options import IncorrectLookupParameters
from django.core.exceptions import PermissionDenied
from django.core.paginator import Paginator
from django.db.models import Q
from django.http import HttpRequest, HttpResponseBase, HttpResponseRedirect
from django.http.response import StreamingHttpResponse
from django.utils import timezone
from django.utils.dateparse import parse_datetime
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from django_pglock.admin.pages import AtLeast, CappedChangeList, filter_of, one_choice, record
from django_pglock.admin.task_page import last_failures
from django_pglock.conf import redact_hook
from django_pglock.models import Task, Worker
from django_pglock.store.attempts import last_ended_by
from django_pglock.store.count import MOST_SEARCHED
from django_pglock.store.id_range import id_in, ids_between, search_end
from django_pglock.store.statements import in_status, is_among
from django_pglock.store.steps import suspended, waiting_for_event
from django_pglock.tasks import registry
from django_pglock.tasks.call_keys import positional_names
from django_pglock.tasks.compat import task_backends
from django_pglock.tasks.redaction import redacting_paths, shown
from django_pglock.tasks.states import FINISHED, TaskStatus

#: Tasks are not enqueued exactly in the order of their ids: a transaction may have got its ids earlier.
ORDER_TOLERANCE = timedelta(minutes=1)
#: The tasks that wait for one event and are searched at most: each is looked up by its id.
MOST_WAITING = 2000
#: Parameters that choose no tasks: Django's own, which change the page or the order.
_NO_FILTERS = {"p", "o", "e", "all"}
#: The orders of lists. The index of the failed tasks of a group has no column for the status: with it, a count would
#: read each row.
BY_ID, BY_STATUS = ("-pk",), ("-status", "-pk")
_STATUSES = frozenset(TaskStatus.values)


@dataclass(frozen=True)
class Index:
    """An index of the table of tasks, as far as a list has to know it."""

    name: str
    #: The statuses whose tasks it has. An empty text: it has those of a list that no status is chosen for.
    statuses: frozenset[str]
    order: tuple[str, ...] = BY_ID
    #: The parameter of the filter that it serves besides the status, if no other is chosen. A search in it could not
    #: stop at an id.
    parameter: str = ""


#: The indexes, those that leave the fewest tasks first. Groups of failures have links only.
INDEXES = (
    Index("pglock_task_fingerprint", frozenset([TaskStatus.FAILED.value]), parameter="fingerprint__exact"),
    Index("pglock_task_lock", _STATUSES - FINISHED | {""}, BY_STATUS, parameter="key"),
    Index("pglock_task_attention", _STATUSES - {TaskStatus.SUCCESSFUL}, BY_STATUS),
    # Most tasks have succeeded, so a search finds them soon along the primary key.
    Index("django_pglock_task_pkey", frozenset([""])),
)


class Reading:
    """How the tasks of a request are read: along which index, and whether this index serves all filters."""

    def __init__(self, request: HttpRequest) -> None:
        given = {name: str(text).strip() for name, text in request.GET.items() if not name.startswith(("_", "id__"))}
        self.chosen = {name: text for name, text in given.items() if text and name not in _NO_FILTERS}
        if self.chosen.get("q", "x").isdigit():
            # An id, which the primary key finds among whatever else was chosen.
            del self.chosen["q"]
        self.below = id_in(request.GET.get("id__lt", ""))
        #: The chosen status, or the one that all tasks of a filter have; an empty text for any.
        self.status = (
            self.chosen.get("status__exact")
            or self.chosen.get("suspended")
            or next((each.status for each in FILTERS if each.status and each.parameter_name in self.chosen), "")
        )
        others = self.chosen.keys() - {"status__exact"}
        fitting = (each for each in INDEXES if self.status in each.statuses)
        self.index = next((each for each in fitting if not each.parameter or others == {each.parameter}), INDEXES[-1])
        #: Whether only the newest tasks of the index are searched, because it does not serve all filters.
        self.is_search = self.status not in self.index.statuses or not others <= {self.index.parameter}
        #: The last one of the tasks that wait for the chosen event, if there may be more.
        self.last_waiting: int | None = None
        self._ids: dict[str, int] | None = None

    @classmethod
    def of(cls, request: Any) -> Reading:
        """Return the reading of a request. It is kept there, because the list and its filters ask for it."""
        if not hasattr(request, "pglock_reading"):
            request.pglock_reading = cls(request)
        found: Reading = request.pglock_reading
        return found

    def in_status(self, tasks: Any, status: str) -> Any:
        """Return those of the tasks that have a status, by a condition that fits the index."""
        return tasks.filter(status=status) if self.index.order == BY_ID else in_status(tasks, status)

    def ids(self, using: str) -> dict[str, int]:
        """Return conditions on the ids of the chosen time. Asks once."""
        if self._ids is None:
            shifts = {"since": -ORDER_TOLERANCE, "before": ORDER_TOLERANCE}
            since, before = (
                moment_in(self.chosen[name], shift) if name in self.chosen else None for name, shift in shifts.items()
            )
            self._ids = ids_between(using, since, before) if since or before else {}
        return self._ids

    def search_end(self, using: str) -> int | None:
        """Return the id at which a search among the newest tasks stops; None if it reaches the oldest task."""
        if "event" in self.chosen:
            return self.last_waiting
        tasks = Task.objects.using(using).filter(**self.ids(using)).order_by(*self.index.order)
        if self.below is not None:
            tasks = tasks.filter(pk__lt=self.below)
        if self.index.order == BY_STATUS:
            tasks = in_status(tasks, self.status)
        return search_end(tasks, most=MOST_SEARCHED)


def queues_of_the_code() -> set[str]:
    """Return the queues of the settings and of the functions that this process knows."""
    configured = {queue for backend in task_backends.all() for queue in backend.queues}
    return configured | {task.queue_name for task in registry.definitions()}


class TypedFilter(admin.SimpleListFilter):
    """A filter by one typed value: a small form with suggestions, instead of a link for each of hundreds of values.

    The form sends a GET request and needs no script; the suggestions are a ``datalist``.
    """

    template = "admin/django_pglock/filter_form.html"
    #: The type of the input, and what to type, shown in the empty input.
    input_type = "search"
    placeholder: Any = ""
    #: Returns the values that the browser suggests. They are not queried: a query would read the whole table.
    suggestions: Callable[[], Iterable[str]] = staticmethod(tuple)
    #: The status that all tasks of the filter have.
    status = ""
    #: Returns the rows with the value; None: the parameter is the name of the column.
    matching: Callable[[Reading, Any, str], Any] | None = None
    #: Whether the values may be redacted. With a filter a user could guess a hidden value. So the filter never finds
    #: tasks of which anything is redacted. It is refused if ``REDACT`` is set, because ``REDACT`` decides only when a
    #: value is shown.
    is_guarded = False

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Return none: the form takes any value."""
        return []

    def has_output(self) -> bool:
        """Return True: the form is always shown."""
        return True

    def choices(self, changelist: Any) -> Iterator[Any]:
        """Yield what the template shows: the value, the suggestions, and the parameters of the other filters."""
        yield {
            "value": self.value() or "",
            "suggestions": sorted(self.suggestions()),
            "others": [(name, each) for name, each in changelist.params.items() if name != self.parameter_name],
            "query_string": changelist.get_query_string(remove=[str(self.parameter_name)]),
        }

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        """Keep the rows with the value, if one was typed."""
        value = (self.value() or "").strip()
        if not value:
            return queryset
        if self.is_guarded:
            if redact_hook() is not None:
                text = gettext("This list cannot be filtered by %(what)s, because REDACT may hide them.")
                messages.warning(request, text % {"what": self.title})
                return queryset.none()
            queryset = queryset.exclude(meta__has_key="redact").exclude(task_path__in=redacting_paths())
        if self.matching is None:
            return queryset.filter(**{str(self.parameter_name): value})
        return self.matching(Reading.of(request), queryset, value)


class StatusFilter(admin.ChoicesFieldListFilter):
    """Filter by status, with the condition of the index that serves it."""

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        """Keep the rows with the selected status."""
        status = request.GET.get("status__exact")
        return Reading.of(request).in_status(queryset, status) if status else super().queryset(request, queryset)


class SuspendedFilter(admin.SimpleListFilter):
    """A filter by what suspends a task between two of its steps. The value is the status that such a task has."""

    parameter_name = "suspended"
    title = _("steps")
    status = ""

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        """Return the choices."""
        return [
            (TaskStatus.SCHEDULED.value, _("Sleeps, or waits for an event")),
            (TaskStatus.BLOCKED.value, _("Waits for its children")),
        ]

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        """Keep the suspended tasks of the chosen kind."""
        status = self.value()
        return suspended(Reading.of(request).in_status(queryset, status)) if status else queryset


def _by_exception(reading: Reading, rows: Any, value: str) -> Any:
    """Keep the failed tasks whose last attempt ended with the exception."""
    return last_ended_by(reading.in_status(rows, TaskStatus.FAILED.value), value)


def _by_moment(time: str, id_: str) -> Callable[[Reading, Any, str], Any]:
    """Keep the rows on one side of a moment. Ids grow with the time of the enqueue, so ids, which have an index, do."""
    return lambda reading, rows, value: rows.filter(**{time: moment_in(value), id_: reading.ids(rows.db)[id_]})


def _by_worker(reading: Reading, rows: Any, value: str) -> Any:
    """Keep the rows of the worker of this id or, while its row exists, of this name."""
    try:
        return rows.filter(worker=UUID(value))
    except ValueError:
        known = Worker.objects.using(rows.db).filter(name=value).values_list("pk", flat=True)
        # Read before: with a join the server might read all tasks.
        return rows.filter(worker__in=list(known))


def _by_key(reading: Reading, rows: Any, value: str) -> Any:
    """Keep unfinished tasks with the key, for which there is an index; finished ones if their status is chosen."""
    rows = rows.filter(lock_key=value)
    return rows if reading.status in FINISHED else rows.filter(finished_at__isnull=True)


def _by_argument(reading: Reading, rows: Any, value: str) -> Any:
    """Keep the rows with the keyword argument or, if a function is chosen, with the positional argument."""
    name, values = _pair(value)
    definition = registry.find(reading.chosen.get("task_path", ""))
    names = positional_names(definition, 1) if definition is not None else []
    matches = _has("kwargs__contains", [{name: each} for each in values])
    return rows.filter(matches | _has(f"args__{names.index(name)}", values) if name in names else matches)


def _by_metadata(reading: Reading, rows: Any, value: str) -> Any:
    name, values = _pair(value)
    return rows.filter(_has("meta__contains", [{name: each} for each in values]))


def _by_event(reading: Reading, rows: Any, value: str) -> Any:
    """Keep the newest tasks that wait for the event."""
    # Read before: with a join the server might read all tasks.
    ids = waiting_for_event(rows.db, value, below=reading.below, limit=MOST_WAITING)
    reading.last_waiting = ids[-1] if len(ids) == MOST_WAITING else None
    return reading.in_status(rows, TaskStatus.SCHEDULED.value).filter(is_among(ids))


_typed = partial(filter_of, TypedFilter)
_STUCK, _FAILED, _MOMENT = ("stuck", _("Stuck: worker is dead")), TaskStatus.FAILED.value, "datetime-local"
#: The filters of the list, in the order of the page. The page begins with that of the status. Suggested are the queues
#: and functions that this process knows; the page of queues lists all.
FILTERS: tuple[Any, ...] = (
    one_choice("attention", _("attention"), choice=_STUCK, method="stuck", status=TaskStatus.RUNNING.value),
    SuspendedFilter,
    _typed("event", _("event"), placeholder="packed:7", status=TaskStatus.SCHEDULED.value, matching=_by_event),
    _typed("queue", _("queue"), suggestions=queues_of_the_code),
    _typed("task_path", _("task function"), suggestions=registry.known_paths),
    _typed("exception", _("exception"), placeholder="builtins.ValueError", status=_FAILED, matching=_by_exception),
    _typed("since", _("time: enqueued since"), input_type=_MOMENT, matching=_by_moment("enqueued_at__gte", "pk__gt")),
    _typed("before", _("time: enqueued before"), input_type=_MOMENT, matching=_by_moment("enqueued_at__lt", "pk__lt")),
    _typed("worker", _("worker"), matching=_by_worker),
    _typed("key", _("lock key"), matching=_by_key, is_guarded=True),
    _typed("argument", _("arguments"), placeholder="order_id=7", matching=_by_argument, is_guarded=True),
    _typed("metadata", _("metadata"), placeholder="tenant=acme", matching=_by_metadata, is_guarded=True),
)


class IndexedList(CappedChangeList):
    """Reads along the index that the filters name. If it does not serve all of them, searches only the newest tasks.

    A search counts nothing: it stops behind the last task that the page shows.
    """

    #: The id at which the search among the newest tasks stopped; None if it has reached the oldest task.
    search_end: int | None = None
    #: The number of tasks that were searched at most.
    searched = 0
    #: Whether more rows match than the page shows.
    has_more = False

    def find_rows(self, request: HttpRequest) -> None:
        """Find the tasks of the page, and the last failure of each. Actions on all matches are not limited."""
        # A list does not show these, and they may have megabytes.
        self.queryset = self.queryset.defer("args", "kwargs", "result", "meta", "log", "progress", "stack")
        if Reading.of(request).is_search:
            self._search(Reading.of(request))
        else:
            super().find_rows(request)
            self.has_more = self.is_capped or self.page_num < self.paginator.num_pages
        self.result_list: Any = list(self.result_list)
        failures = last_failures(self.root_queryset.db, self.result_list)
        for task in self.result_list:
            task.last_failure = failures.get(task.pk)

    def _search(self, reading: Reading) -> None:
        self.searched = MOST_WAITING if "event" in reading.chosen else MOST_SEARCHED
        self.search_end = reading.search_end(self.root_queryset.db)
        if self.search_end is not None:
            self.queryset = self.queryset.filter(pk__gt=self.search_end)
        rows = list(self.queryset[: self.list_per_page + 1])
        self.has_more = len(rows) > self.list_per_page
        self.result_count = AtLeast(len(rows)) if self.has_more or self.search_end is not None else len(rows)
        self.result_list = rows[: self.list_per_page]
        self.paginator = Paginator(self.result_list, self.list_per_page)
        self.show_admin_actions, self.full_result_count = True, None
        self.show_full_result_count = self.can_show_all = self.multi_page = False

    @property
    def older_query(self) -> str:
        """The query string of the tasks below the last one shown or, after a limited search, of those not searched."""
        ids = [each.pk for each in self.result_list]
        if ids and self.has_more and ids == sorted(ids, reverse=True):
            return self.get_query_string({"id__lt": ids[-1]}, remove=["p"])
        if self.search_end is not None:
            return self.get_query_string({"id__lt": self.search_end + 1}, remove=["p"])
        return ""

    def get_ordering(self, request: HttpRequest, queryset: Any) -> list[Any]:
        """Sort in the order of the index: by id, or by status and id."""
        ordering: list[Any] = super().get_ordering(request, queryset)
        if Reading.of(request).index.order == BY_ID:
            return ordering
        direction = "-" if ordering[0].startswith("-") else ""
        return [f"{direction}status", *ordering]


def find(queryset: Any, term: str) -> Any:
    """Filter tasks by id, by the name of the function, or by the beginning of its path. JSON columns are never read."""
    if term.isascii() and term.isdigit():
        number = id_in(term)
        return queryset.none() if number is None else queryset.filter(pk=number)
    # This process knows all paths, and they are few, so the query has a list of values instead of a pattern.
    paths = [path for path in registry.known_paths() if path.startswith(term) or path.endswith(f".{term}")]
    return queryset.filter(task_path__in=[term, *paths])


def moment_in(text: str, shift: timedelta = timedelta(0)) -> datetime:
    """Return the moment that a text is, shifted. Raises ``ValueError`` or ``OverflowError``."""
    moment = parse_datetime(text)
    if moment is None:
        raise ValueError(text)
    if timezone.is_naive(moment) and settings.USE_TZ:
        moment = timezone.make_aware(moment)
    return moment + shift


def _has(lookup: str, values: Iterable[Any]) -> Q:
    return reduce(or_, (Q(**{lookup: each}) for each in values))


def _pair(text: str) -> tuple[str, list[Any]]:
    """Return the name and the possible values of ``name=value``: as text and as JSON, for 7 may be "7" in the row.

    Raises ``IncorrectLookupParameters``.
    """
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not name:
        raise IncorrectLookupParameters
    try:
        # PostgreSQL has no JSON for NaN and infinity.
        return name, [value, json.loads(value, parse_constant=str)]
    except (ValueError, RecursionError):
        return name, [value]


# Export of the filtered list as CSV: streamed, and redacted as the pages are

#: At most this number of tasks is exported, and this number is fetched at a time.
MOST_EXPORTED, CHUNK = 100_000, 1000
#: The fields of an exported task, apart from its exception and message.
FIELDS = (
    *("id", "status", "queue", "priority", "task_path", "args", "kwargs", "result", "meta", "attempts_made", "worker"),
    *("lock_key", "unique_key", "group_key", "enqueued_at", "run_after", "started_at", "finished_at"),
)
#: A spreadsheet takes a cell that begins with one of these for a formula.
_BEGINS_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


def export_view(model_admin: Any, request: HttpRequest) -> HttpResponseBase:
    """Send the tasks that match the filters of the query string: only by POST, and with the permission to export."""
    if not (model_admin.has_view_permission(request) and model_admin.has_export_permission(request)):
        raise PermissionDenied
    there = f"{model_admin.address('changelist')}?{request.GET.urlencode()}"
    try:
        rows = model_admin.get_changelist_instance(request).queryset.defer(None)
    except IncorrectLookupParameters:
        return HttpResponseRedirect(there)
    if rows.values("pk")[: MOST_EXPORTED + 1].count() > MOST_EXPORTED:
        text = gettext("More than %(count)d tasks match. Narrow the filters, such as by time, and export again.")
        messages.error(request, text % {"count": MOST_EXPORTED})
        return HttpResponseRedirect(there)
    record(request, Task, f"export: ?{request.GET.urlencode()}")
    headers = {"Content-Disposition": f'attachment; filename="tasks-{timezone.now():%Y%m%d-%H%M%S}.csv"'}
    return StreamingHttpResponse(_lines(rows), content_type="text/csv; charset=utf-8", headers=headers)


def _lines(rows: Any) -> Iterator[str]:
    """Yield the tasks as people may see them. The rows come from a cursor of the server, some at a time."""
    yield _line([*FIELDS, "exception", "message"])
    tasks = rows.iterator(chunk_size=CHUNK)
    while chunk := list(islice(tasks, CHUNK)):
        failures = last_failures(rows.db, chunk)
        for task in chunk:
            yield _line([*(shown(task, name) for name in FIELDS), *failures.get(task.pk, (None, None))[:2]])


def _line(values: Iterable[Any]) -> str:
    line = io.StringIO()
    csv.writer(line).writerow(map(_cell, values))
    return line.getvalue()


def _cell(value: Any) -> Any:
    if isinstance(value, (dict, list)):
        return json.dumps(value, ensure_ascii=False)
    is_formula = isinstance(value, str) and value.startswith(_BEGINS_FORMULA)
    return f"'{value}" if is_formula else value
