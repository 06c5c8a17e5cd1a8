"""Export of the tasks of a filtered list as CSV or as JSON lines: streamed, and redacted as the pages are."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from django.contrib import messages
from django.contrib.admin.options import IncorrectLookupParameters
from django.core.exceptions import PermissionDenied
from django.core.serializers.json import DjangoJSONEncoder
from django.http import Http404, HttpRequest, HttpResponseBase, HttpResponseRedirect
from django.http.response import StreamingHttpResponse
from django.utils import timezone
from django.utils.translation import gettext

from django_pglock.admin.actions import record
from django_pglock.admin.task_list import IndexedList
from django_pglock.admin.task_page import last_failures
from django_pglock.models import Task
from django_pglock.tasks.redaction import shown

#: At most this number of tasks is exported.
MOST_EXPORTED = 100_000
#: Rows that are fetched at a time.
CHUNK = 1000
#: The fields of an exported task, apart from its exception and message.
FIELDS = (
    *("id", "status", "queue", "priority", "task_path", "args", "kwargs", "result", "meta", "attempts_made", "worker"),
    *("lock_key", "unique_key", "group_key", "enqueued_at", "run_after", "started_at", "finished_at"),
)
#: The fields with JSON. Another program may have written JSON that Python cannot read.
#: A spreadsheet takes a cell that begins with one of these for a formula.
_BEGINS_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


def export_view(model_admin: Any, request: HttpRequest, form: str) -> HttpResponseBase:
    """Send the tasks that match the filters of the query string: only by POST, and with the permission to export."""
    if not (model_admin.has_view_permission(request) and model_admin.has_export_permission(request)):
        raise PermissionDenied
    if form not in FORMS:
        raise Http404
    there = f"{model_admin.address('changelist')}?{request.GET.urlencode()}"
    try:
        found: IndexedList = model_admin.get_changelist_instance(request)
    except IncorrectLookupParameters:
        return HttpResponseRedirect(there)
    rows = found.rows_for_export(request, most=MOST_EXPORTED)
    if rows.values("pk")[: MOST_EXPORTED + 1].count() > MOST_EXPORTED:
        text = gettext("More than %(count)d tasks match. Narrow the filters, such as by time, and export again.")
        messages.error(request, text % {"count": MOST_EXPORTED})
        return HttpResponseRedirect(there)
    record(request, Task, f"export as {form}: ?{request.GET.urlencode()}")
    write, content_type = FORMS[form]
    name = f"tasks-{timezone.now():%Y%m%d-%H%M%S}.{form}"
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return StreamingHttpResponse(write(_exported(rows)), content_type=content_type, headers=headers)


def _exported(rows: Any) -> Iterator[dict[str, Any]]:
    """Yield the tasks as people may see them. The rows come from a cursor of the server, some at a time."""
    tasks = rows.iterator(chunk_size=CHUNK)
    while chunk := list(islice(tasks, CHUNK)):
        failures = last_failures(rows.db, chunk)
        for task in chunk:
            exception, message = failures.get(task.pk, (None, None))
            yield {**{name: shown(task, name) for name in FIELDS}, "exception": exception, "message": message}


def _as_csv(tasks: Iterable[dict[str, Any]]) -> Iterator[str]:
    yield _line([*FIELDS, "exception", "message"])
    for task in tasks:
        yield _line(map(_cell, task.values()))


def _line(cells: Iterable[Any]) -> str:
    line = io.StringIO()
    csv.writer(line).writerow(cells)
    return line.getvalue()


def _cell(value: Any) -> Any:
    if isinstance(value, (dict, list)):
        return json.dumps(value, ensure_ascii=False)
    is_formula = isinstance(value, str) and value.startswith(_BEGINS_FORMULA)
    return f"'{value}" if is_formula else value


def _as_json_lines(tasks: Iterable[dict[str, Any]]) -> Iterator[str]:
    for task in tasks:
        yield json.dumps(task, ensure_ascii=False, cls=DjangoJSONEncoder) + "\n"


#: How each form is written, and its content type.
FORMS = {
    "csv": (_as_csv, "text/csv; charset=utf-8"),
    "jsonl": (_as_json_lines, "application/jsonl; charset=utf-8"),
}
