"""Sentry: failed tasks as issues, traces from caller to task, and check-ins of schedules; the extra ``[sentry]``::

    from django_pglock.contrib.sentry import PGLockIntegration

    sentry_sdk.init(dsn=..., integrations=[PGLockIntegration()])

A failure is reported when its task has failed for good, as Sentry's own integrations of Celery and RQ do: a retry is
part of normal operation.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import sentry_sdk
from sentry_sdk import traces
from sentry_sdk.consts import OP, SPANDATA
from sentry_sdk.crons import MonitorStatus, capture_checkin
from sentry_sdk.integrations import Integration
from sentry_sdk.scope import add_global_event_processor, should_send_default_pii
from sentry_sdk.tracing import TransactionSource
from sentry_sdk.tracing_utils import has_span_streaming_enabled
from sentry_sdk.utils import event_from_exception, has_data_collection_enabled

from django_pglock.errors import TaskCancelled
from django_pglock.loggers import OF_DJANGO_TASKS
from django_pglock.store.outcome import Cancelled, Failed, Mixed, Succeeded
from django_pglock.store.schedules import SCHEDULE_NAME
from django_pglock.tasks import instrumentation
from django_pglock.tasks.arguments import from_json
from django_pglock.tasks.claim import Claim
from django_pglock.tasks.fields import TaskFields
from django_pglock.tasks.instrumentation import headers_of
from django_pglock.tasks.redaction import is_redacted, shown
from django_pglock.tasks.retry import Cancel
from django_pglock.tasks.schedules import is_scheduled, timing_of

INSTRUMENT = "sentry"
ORIGIN = "auto.queue.django_pglock"
#: The loggers that report the end of each task. Sentry would make events of their records, too.
LOGGERS = ("django_pglock.worker", *OF_DJANGO_TASKS)
#: The attribute of exceptions that were reported with their tasks.
REPORTED = "_django_pglock_reported"
#: The most characters of a monitor's slug.
LONGEST_SLUG = 50
#: Sentry's units of an interval, in seconds. It knows no shorter ones.
UNITS = {"day": 86400, "hour": 3600, "minute": 60}


class PGLockIntegration(Integration):  # type: ignore[misc]
    """The integration for ``sentry_sdk.init(integrations=[...])``.

    ``monitor_schedules``: send check-ins of functions with ``cron`` or ``every`` to Sentry's Crons, which makes a
    monitor for each. Off by default, because Sentry bills monitors.
    """

    identifier = "django_pglock"
    origin = ORIGIN

    def __init__(self, *, monitor_schedules: bool = False) -> None:
        self.monitor_schedules = monitor_schedules

    @staticmethod
    def setup_once() -> None:
        """Observe the tasks of this process. Called by Sentry, once."""
        instrumentation.add(SentryInstrument())
        add_global_event_processor(_without_reported)


class SentryInstrument:
    """The instrument. It observes while the client of the process has the integration."""

    name = INSTRUMENT

    def enqueuing(self, task: TaskFields) -> Generator[Any, Any, None]:
        """Observe by a span ``queue.publish``, if the caller has one, and pass the caller's trace on."""
        if _integration() is None:
            return
        data = {SPANDATA.MESSAGING_SYSTEM: "postgresql", SPANDATA.MESSAGING_DESTINATION_NAME: task.queue_name}
        with _child_span(OP.QUEUE_PUBLISH, task.module_path, data) as span:
            ids, error = yield dict(sentry_sdk.get_current_scope().iter_trace_propagation_headers())
            if span is not None:
                _set(span, {SPANDATA.MESSAGING_MESSAGE_ID: ids[0]} if len(ids) == 1 else {})
                _end(span, is_error=error is not None)

    def running(self, attempt: Any) -> Generator[None, Any, None]:
        """Observe by a transaction, with a scope of its own, in the trace of the caller. Report a failure."""
        integration, claim = _integration(), attempt.claims[0]
        if integration is None:
            return
        meta = from_json(claim.meta)
        row = SimpleNamespace(task_path=claim.task_path, meta=meta, args=attempt.args, kwargs=attempt.kwargs)
        check_in = _check_in_of(attempt.definition, claim, meta) if integration.monitor_schedules else None
        with sentry_sdk.isolation_scope() as scope, _root_span(claim) as span:
            scope.clear_breadcrumbs()
            scope.add_event_processor(partial(_describe, claim, row))
            if check_in is not None:
                capture_checkin(**check_in, status=MonitorStatus.IN_PROGRESS)
            outcome = yield
            if isinstance(outcome, Mixed):
                for call, each in zip(attempt.claims, outcome.each, strict=True):
                    with sentry_sdk.new_scope() as own:
                        own.add_event_processor(partial(_describe, call, _row_of_call(call)))
                        _report(call, each)
            _report(claim, outcome)
            if check_in is not None and isinstance(outcome, Succeeded | Failed | Cancelled):
                status = MonitorStatus.OK if isinstance(outcome, Succeeded) else MonitorStatus.ERROR
                capture_checkin(**check_in, status=status)
            # Without an outcome, the task no longer belongs to this worker.
            has_failed = outcome is None or getattr(outcome, "failure", None) is not None
            _end(span, is_error=has_failed and not isinstance(outcome, Cancelled))

    def stepping(self, name: str) -> Generator[None, Any, None]:
        """Observe by a span inside that of the attempt."""
        with _child_span("function", f"step {name}", {}) as span:
            failure = yield
            if span is not None:
                _end(span, is_error=failure is not None)


def _row_of_call(claim: Claim) -> SimpleNamespace:
    """Return what is shown of one call of a group."""
    meta, kwargs = from_json(claim.meta), from_json(claim.kwargs)
    return SimpleNamespace(task_path=claim.task_path, meta=meta, args=[], kwargs=kwargs)


def _report(claim: Claim, outcome: Any) -> None:
    """Report the exception by which a task has failed, if it has."""
    if not isinstance(outcome, Failed) or (error := outcome.failure.exception) is None:
        return
    mechanism = {"type": PGLockIntegration.identifier, "handled": False}
    event, hint = event_from_exception(error, sentry_sdk.get_client().options, mechanism)
    event["fingerprint"] = [claim.task_path, outcome.failure.exception_path]
    sentry_sdk.capture_event(event, hint=hint)
    # Not setattr(): the class of the exception is the user's.
    object.__setattr__(error, REPORTED, True)


def _describe(claim: Claim, row: Any, event: Any, hint: Any) -> Any:
    """Add the task to an event of its attempt, also to events that the function itself sends."""
    task = {"id": str(claim.id), "function": claim.task_path, "queue": claim.queue, "attempt": claim.number}
    if _may_send_arguments():
        task.update(args=shown(row, "args"), kwargs=shown(row, "kwargs"))
    if is_redacted(row):
        # Arguments are variables of frames.
        for frame in _frames_of(event):
            frame.pop("vars", None)
    event.setdefault("contexts", {})["task"] = task
    event.setdefault("tags", {}).update(task_id=str(claim.id), task=claim.task_path, queue=claim.queue)
    return event


def _integration() -> PGLockIntegration | None:
    return sentry_sdk.get_client().get_integration(PGLockIntegration)  # type: ignore[no-any-return]


def _frames_of(event: Any) -> Iterator[dict[str, Any]]:
    """Yield the frames of an event: of its exceptions, and of the thread in which it was made."""
    for part in ("exception", "threads"):
        for value in (event.get(part) or {}).get("values") or ():
            yield from (value.get("stacktrace") or {}).get("frames") or ()


def _without_reported(event: Any, hint: Any) -> Any:
    """Drop the event that Sentry makes of a log record about a task that was reported here, or that was cancelled."""
    if event.get("logger") not in LOGGERS:
        return event
    error = (hint.get("exc_info") or (None, None))[1]
    is_known = error is not None and (isinstance(error, Cancel | TaskCancelled) or getattr(error, REPORTED, None))
    return None if is_known else event


def _may_send_arguments() -> bool:
    options = sentry_sdk.get_client().options
    if has_data_collection_enabled(options):
        return bool(options["data_collection"]["queues"])
    return bool(should_send_default_pii())


# Spans. Sentry has two ways to send them, with an API each.


def _is_streaming() -> bool:
    return bool(has_span_streaming_enabled(sentry_sdk.get_client().options))


def _root_span(claim: Claim) -> Any:
    """Return the span of an attempt, in the trace of the call that has enqueued the task."""
    data = {
        SPANDATA.MESSAGING_SYSTEM: "postgresql",
        SPANDATA.MESSAGING_DESTINATION_NAME: claim.queue,
        SPANDATA.MESSAGING_MESSAGE_ID: str(claim.id),
        SPANDATA.MESSAGING_MESSAGE_RETRY_COUNT: claim.retries,
        SPANDATA.MESSAGING_MESSAGE_RECEIVE_LATENCY: round(claim.waited * 1000),
    }
    headers, path = dict(headers_of(claim.meta, INSTRUMENT)), claim.task_path
    if _is_streaming():
        traces.continue_trace(headers)
        details = {"sentry.op": OP.QUEUE_PROCESS, "sentry.origin": ORIGIN, "sentry.segment.name.source": "task", **data}
        return traces.start_span(name=path, attributes=details, parent_span=None)
    options = {"op": OP.QUEUE_PROCESS, "name": path, "source": TransactionSource.TASK, "origin": ORIGIN}
    transaction = sentry_sdk.start_transaction(sentry_sdk.continue_trace(headers, **options))
    _set(transaction, data)
    return transaction


@contextmanager
def _child_span(operation: str, name: str, data: Mapping[str, Any]) -> Iterator[Any]:
    """Make a span inside of the caller's span in a block; None if the caller has none."""
    is_streaming = _is_streaming()
    if (traces if is_streaming else sentry_sdk).get_current_span() is None:
        yield None
    elif is_streaming:
        about = {"sentry.op": operation, "sentry.origin": ORIGIN, **data}
        with traces.start_span(name=name, attributes=about) as span:
            yield span
    else:
        with sentry_sdk.start_span(op=operation, name=name, origin=ORIGIN) as span:
            _set(span, data)
            yield span


def _set(span: Any, data: Mapping[str, Any]) -> None:
    note = span.set_attribute if _is_streaming() else span.set_data
    for name, value in data.items():
        note(name, value)


def _end(span: Any, *, is_error: bool) -> None:
    if _is_streaming():
        span.status = "error" if is_error else "ok"
    else:
        span.set_status("internal_error" if is_error else "ok")


# Check-ins


def _check_in_of(task: TaskFields, claim: Claim, meta: Any) -> dict[str, Any] | None:
    """Return what identifies the check-in of a tick, in all attempts; None if Sentry cannot monitor this task."""
    # Monitors are those of the code: people may create and delete their schedules at any time.
    tick = meta.get("schedule") if isinstance(meta, dict) and SCHEDULE_NAME not in meta else None
    config = _monitor_of(task) if tick is not None and is_scheduled(task) else None
    if config is None:
        return None
    return {
        "monitor_slug": slug_of(claim.task_path),
        "monitor_config": config,
        "check_in_id": uuid.uuid5(uuid.NAMESPACE_URL, f"{claim.task_path} {tick} {claim.id}").hex,
    }


def _monitor_of(task: TaskFields) -> dict[str, Any] | None:
    timing = timing_of(task)
    if not timing.is_every:
        return {"schedule": {"type": "crontab", "value": timing.expression}, "timezone": timing.zone}
    seconds = timing.interval
    for unit, length in UNITS.items():
        if seconds % length == 0:
            return {"schedule": {"type": "interval", "value": int(seconds // length), "unit": unit}}
    return None


def slug_of(path: str) -> str:
    """Return the slug of a function's monitor: its path. A long path is shortened, and ends in a digest."""
    slug = re.sub(r"[^a-z0-9_-]+", "-", path.lower())
    if len(slug) <= LONGEST_SLUG:
        return slug
    digest = hashlib.sha256(path.encode()).hexdigest()[:8]
    return f"{digest}-{slug[len(digest) + 1 - LONGEST_SLUG :].lstrip('-_')}"
