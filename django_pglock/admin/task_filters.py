"""The filters of the list of tasks. No filter reads the whole table, neither for its choices nor for its matches."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from datetime import timezone as zones
from functools import partial, reduce
from operator import or_
from typing import Any
from uuid import UUID

from django.contrib import admin, messages
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.postgres.expressions import ArraySubquery
from django.db.models import BooleanField, F, Func, Q
from django.http import HttpRequest
from django.utils import timezone
from django.utils.dateparse import parse_datetime
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from django_pglock.admin.pages import OneChoiceFilter
from django_pglock.conf import redact_hook
from django_pglock.errors import TaskArgumentsError
from django_pglock.models import Task, Worker
from django_pglock.store.attempts import last_ended_by
from django_pglock.store.count import FIRST_SEARCHED, MOST_SEARCHED, in_status
from django_pglock.store.id_range import IdRange, id_in, ids_between
from django_pglock.tasks import registry
from django_pglock.tasks.arguments import to_json
from django_pglock.tasks.call_keys import positional_names
from django_pglock.tasks.compat import task_backends
from django_pglock.tasks.redaction import redacting_paths
from django_pglock.tasks.states import FINISHED, TaskStatus


class FormFilter(admin.SimpleListFilter):
    """A filter by one typed value, with suggestions."""

    template = "admin/django_pglock/filter_form.html"
    #: The type of the input.
    input_type = "search"
    #: What to type, shown in the empty input.
    placeholder: Any = ""

    def suggestions(self) -> Iterable[str]:
        """Return the values that the browser suggests. They are not queried: a query would read the whole table."""
        return ()

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Return none: the form takes any value."""
        return []

    def has_output(self) -> bool:
        """Return True: the form is always shown."""
        return True

    def choices(self, changelist: Any) -> Iterator[Any]:
        """Yield what the template shows: the value, the suggestions, and the parameters of the other filters."""
        own = {str(self.parameter_name), "p", "e"}
        yield {
            "value": self.value() or "",
            "suggestions": sorted(self.suggestions()),
            # ``filter_params`` has one list of values for each parameter.
            "others": [(name, each) for name, values in changelist.filter_params.items() if name not in own
                       for each in (values if isinstance(values, list) else [values])],
            "query": changelist.query,
            "query_string": changelist.get_query_string(remove=sorted(own)),
        }  # fmt: skip

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        """Keep the rows with the value, if one was typed."""
        value = (self.value() or "").strip()
        return self.matching(request, queryset, value) if value else queryset

    def matching(self, request: HttpRequest, queryset: Any, value: str) -> Any:
        """Keep the rows with the value."""
        return queryset.filter(**{str(self.parameter_name): value})


#: Tasks are not enqueued exactly in the order of their ids: a transaction may have got its ids earlier.
ORDER_TOLERANCE = timedelta(minutes=1)
#: Parameters of filters that have no index, whatever the status is.
UNINDEXED = ("attention", "exception", "argument", "metadata", "since", "before")
#: The attribute of a request that keeps the ids of the chosen time.
_RANGE = "_pglock_time_range"
#: Parameters by which indexes have failed tasks.
NARROW = ("queue", "task_path", "fingerprint__exact")


class StatusFilter(admin.ChoicesFieldListFilter):
    """Filter by status, with the condition of the index that serves it."""

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        """Keep the rows with the selected status."""
        if len(request.GET.getlist("status__exact")) == 1:
            return in_status(queryset, status_of(request), is_narrow=is_narrow(request))
        return super().queryset(request, queryset)


class QueueFilter(FormFilter):
    """Filter by queue; suggests the queues of the settings and of the functions."""

    title = _("queue")
    parameter_name = "queue"

    def suggestions(self) -> Iterable[str]:
        """Return the queues that this process knows. The page of queues lists all."""
        return queues_of_the_code()


class TaskPathFilter(FormFilter):
    """Filter by task function; suggests the functions that are registered in this process, and imports nothing."""

    title = _("task function")
    parameter_name = "task_path"

    def suggestions(self) -> Iterable[str]:
        """Return the functions that this process knows."""
        return registry.known_paths()


class TimeFilter(FormFilter):
    """Filter by the time of enqueueing. Ids grow with that time, so the filter limits ids, too: that has an index."""

    input_type = "datetime-local"
    #: The lookups of the time and of the id.
    lookup: str
    id_lookup: str

    def matching(self, request: HttpRequest, queryset: Any, value: str) -> Any:
        """Keep the rows on one side of the moment. Raises ``IncorrectLookupParameters``."""
        ids = time_range(request, queryset.db).ids
        moment = _moment(request, str(self.parameter_name))
        return queryset.filter(**{self.lookup: moment, self.id_lookup: ids[self.id_lookup]})


class SinceFilter(TimeFilter):
    """Filter: tasks enqueued at a moment or later."""

    title = _("time: enqueued since")
    parameter_name = "since"
    lookup, id_lookup = "enqueued_at__gte", "pk__gt"


class BeforeFilter(TimeFilter):
    """Filter: tasks enqueued before a moment."""

    title = _("time: enqueued before")
    parameter_name = "before"
    lookup, id_lookup = "enqueued_at__lt", "pk__lt"


class WorkerFilter(FormFilter):
    """Filter by worker: its name, while its row exists, or its id."""

    title = _("worker")
    parameter_name = "worker"

    def matching(self, request: HttpRequest, queryset: Any, value: str) -> Any:
        """Keep the rows of the worker."""
        try:
            return queryset.filter(worker=UUID(value))
        except ValueError:
            known = Worker.objects.using(queryset.db).filter(name=value).values("pk")
            # The server reads the array first. With a join it might read all tasks.
            is_one = partial(Func, template="%(expressions)s)", arg_joiner=" = ANY (", output_field=BooleanField())
            return queryset.filter(is_one(F("worker"), ArraySubquery(known)))


class ExceptionFilter(FormFilter):
    """Filter: failed tasks by the exception of their last attempt."""

    title = _("exception")
    parameter_name = "exception"
    placeholder = "builtins.ValueError"

    def matching(self, request: HttpRequest, queryset: Any, value: str) -> Any:
        """Keep the failed tasks with the exception."""
        return last_ended_by(in_status(queryset, TaskStatus.FAILED, is_narrow=is_narrow(request)), value)


class GuardedFilter(FormFilter):
    """A filter by values that may be redacted.

    With a filter a user could guess a hidden value. So the filter never finds tasks of which anything is redacted. The
    filter is refused if ``REDACT`` is set, because ``REDACT`` decides only when a value is shown.
    """

    def matching(self, request: HttpRequest, queryset: Any, value: str) -> Any:
        """Keep the rows that match and of which nothing is redacted."""
        if redact_hook() is not None:
            text = gettext("This list cannot be filtered by %(what)s, because REDACT may hide them.")
            messages.warning(request, text % {"what": self.title})
            return queryset.none()
        open_rows = queryset.exclude(meta__has_key="redact").exclude(task_path__in=redacting_paths())
        return self.guarded(request, open_rows, value)

    def guarded(self, request: HttpRequest, queryset: Any, value: str) -> Any:
        """Keep the rows that match."""
        raise NotImplementedError


class KeyFilter(GuardedFilter):
    """Filter by lock key: unfinished tasks, for which there is an index; finished ones if their status is chosen."""

    title = _("lock key")
    parameter_name = "key"

    def guarded(self, request: HttpRequest, queryset: Any, value: str) -> Any:
        """Keep the rows with the key."""
        rows = queryset.filter(lock_key=value)
        return rows if status_of(request) in FINISHED else rows.filter(finished_at__isnull=True)


class ArgumentFilter(GuardedFilter):
    """Filter by one argument, such as ``order_id=7``."""

    title = _("arguments")
    parameter_name = "argument"
    placeholder = "order_id=7"

    def guarded(self, request: HttpRequest, queryset: Any, value: str) -> Any:
        """Keep the rows whose keyword argument or, if a function is chosen, positional argument has the value."""
        name, values = _pair(value)
        matches = _has("kwargs__contains", [{name: each} for each in values])
        definition = registry.find(request.GET.get("task_path", ""))
        names = positional_names(definition, 1) if definition is not None else []
        if name in names:
            matches |= _has(f"args__{names.index(name)}", values)
        return queryset.filter(matches)


class MetadataFilter(GuardedFilter):
    """Filter by one item of the metadata, such as ``tenant=acme``."""

    title = _("metadata")
    parameter_name = "metadata"
    placeholder = "tenant=acme"

    def guarded(self, request: HttpRequest, queryset: Any, value: str) -> Any:
        """Keep the rows whose metadata contain the item."""
        name, values = _pair(value)
        return queryset.filter(_has("meta__contains", [{name: each} for each in values]))


class StuckFilter(OneChoiceFilter):
    """Filter for tasks that need attention: running tasks whose worker is dead."""

    title = _("attention")
    parameter_name = "attention"
    choice = ("stuck", _("Stuck: worker is dead"))
    method = "stuck"


def queues_of_the_code() -> set[str]:
    """Return the queues of the settings and of the functions that this process knows."""
    configured = {queue for backend in task_backends.all() for queue in backend.queues}
    return configured | {task.queue_name for path in registry.known_paths() if (task := registry.find(path))}


def is_narrow(request: HttpRequest) -> bool:
    """Return whether the list is filtered by a queue, a function or a fingerprint."""
    return bool(narrowed(request))


def narrowed(request: HttpRequest) -> dict[str, str]:
    """Return the queue, the function and the fingerprint by which the list is filtered."""
    return {name: value for name in NARROW if (value := request.GET.get(name, "").strip())}


def is_by_key(request: HttpRequest) -> bool:
    """Return whether the index on lock keys serves the list: it has unfinished tasks, ordered by status."""
    return bool(request.GET.get("key", "").strip()) and status_of(request) not in FINISHED


def status_of(request: HttpRequest) -> str:
    """Return the status by which the list is filtered; an empty string if there is none."""
    chosen = request.GET.getlist("status__exact")
    if len(chosen) == 1:
        return chosen[0]
    return TaskStatus.FAILED.value if request.GET.get("exception") and not chosen else ""


def is_indexed(request: HttpRequest) -> bool:
    """Return whether an index serves the filters of the list."""
    status, chosen = status_of(request), {name for name, value in request.GET.items() if value}
    if chosen & {*UNINDEXED}:
        return False
    if "key" in chosen:
        return is_by_key(request)
    if status == TaskStatus.FAILED:
        return "worker" not in chosen
    if "worker" in chosen or is_narrow(request):
        return status == TaskStatus.RUNNING and not is_narrow(request)
    # Any number of waiting tasks may come before the newest tasks that have succeeded.
    return status != TaskStatus.SUCCESSFUL


def has_index(status: str) -> bool:
    """Return whether an index has the tasks of this status in the order of their ids."""
    return status not in ("", TaskStatus.SUCCESSFUL)


def candidates(request: HttpRequest, using: str) -> Any:
    """Return the tasks among which to search, in the order of the index that has them; of any time."""
    rows = Task.objects.using(using)
    if (below := id_in(request.GET.get("id__lt", ""))) is not None:
        rows = rows.filter(pk__lt=below)
    if status := searched_status(request):
        return in_status(rows, status).order_by("-status", "-pk")
    if status_of(request) == TaskStatus.FAILED:
        rows = in_status(rows, TaskStatus.FAILED, is_narrow=True).filter(**narrowed(request))
    return rows.order_by("-pk")


def searched_status(request: HttpRequest) -> str:
    """Return the status of the tasks among which to search; empty if they are in the order of their ids alone."""
    status = TaskStatus.RUNNING.value if request.GET.get("attention") else status_of(request)
    is_by_id = not has_index(status) or (status == TaskStatus.FAILED and is_narrow(request))
    return "" if is_by_id else status


def time_range(request: HttpRequest, using: str) -> IdRange:
    """Return the ids of the tasks of the chosen time, and where the first search among them ends; asked once.

    Raises ``IncorrectLookupParameters``.
    """
    known: IdRange | None = getattr(request, _RANGE, None)
    if known is None:
        since, before = (
            _moment(request, name, shift) for name, shift in (("since", -ORDER_TOLERANCE), ("before", ORDER_TOLERANCE))
        )
        known = IdRange({}, None)
        if since or before:
            most, status = first_searched(request), searched_status(request)
            known = ids_between(candidates(request, using), since, before, most=most, status=status)
        setattr(request, _RANGE, known)
    return known


def first_searched(request: HttpRequest) -> int:
    """Return how many tasks are searched first. It is more for a user who follows the link to older tasks."""
    return MOST_SEARCHED if request.GET.get("id__lt") else FIRST_SEARCHED


def _moment(request: HttpRequest, name: str, shift: timedelta = timedelta(0)) -> datetime | None:
    """Return the moment typed into a filter, shifted; None if none was typed. Raises ``IncorrectLookupParameters``."""
    text = request.GET.get(name, "").strip()
    if not text:
        return None
    try:
        moment = parse_datetime(text)
        if moment is not None and timezone.is_naive(moment) and timezone.is_aware(timezone.now()):
            moment = timezone.make_aware(moment)
        if moment is not None and timezone.is_aware(moment):
            # PostgreSQL reads no offset from UTC of 16 hours or more.
            moment = moment.astimezone(zones.utc)
        if moment is not None:
            return moment + shift
    except (ValueError, OverflowError):  # also for a moment at the end of the calendar
        pass
    raise IncorrectLookupParameters


def _has(lookup: str, values: Iterable[Any]) -> Q:
    return reduce(or_, (Q(**{lookup: each}) for each in values))


def _pair(text: str) -> tuple[str, list[Any]]:
    """Return the name and the possible values of ``name=value``: as text and as JSON, for 7 may be "7" in the row.

    Raises ``IncorrectLookupParameters``.
    """
    name, equals, value = text.partition("=")
    # PostgreSQL cannot store a NUL character in JSON.
    if not equals or not name.strip() or "\\u0000" in text:
        raise IncorrectLookupParameters
    try:
        read = json.loads(value, parse_constant=lambda name: name)
        to_json(read, what="The value")
    except TaskArgumentsError:
        # PostgreSQL cannot store this value, so no row has it. Examples: 1e999, which is infinity in Python, and a lone
        # surrogate.
        raise IncorrectLookupParameters from None
    except (ValueError, RecursionError):
        return name.strip(), [value.strip()]
    return name.strip(), [value.strip(), read]
