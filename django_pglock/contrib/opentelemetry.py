"""OpenTelemetry: spans and metrics of tasks, and the caller's trace context in the worker; the extra ``[otel]``::

    from django_pglock.contrib.opentelemetry import PGLockInstrumentor

    PGLockInstrumentor().instrument()

Names follow OpenTelemetry's conventions for messaging, which are still in development; all of them are in this module.
The run of a task is a trace of its own with a link to the call that has enqueued it. That is what the conventions
recommend: a task may run an hour later and several times, and one call may run for several tasks, but a span has one
parent.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextvars import Token
from functools import partial
from typing import Any

from opentelemetry import baggage, context, metrics, propagate, trace
from opentelemetry.context import Context
from opentelemetry.instrumentation.instrumentor import BaseInstrumentor
from opentelemetry.metrics import Meter
from opentelemetry.trace import Link, SpanKind, Status, StatusCode, Tracer

from django_pglock import __version__
from django_pglock.error_reading import describe_exception, message_of
from django_pglock.store.outcome import Cancelled, Failure
from django_pglock.tasks import instrumentation
from django_pglock.tasks.arguments import from_json
from django_pglock.tasks.claim import Claim
from django_pglock.tasks.fields import TaskFields
from django_pglock.tasks.instrumentation import AttemptInfo, EnqueueObserver, RunObserver, headers_of

NAME = "opentelemetry"
SCHEMA_URL = "https://opentelemetry.io/schemas/1.37.0"
SYSTEM, OPERATION_NAME, OPERATION_TYPE = "messaging.system", "messaging.operation.name", "messaging.operation.type"
QUEUE, CLIENT = "messaging.destination.name", "messaging.client.id"
MESSAGE_ID, MESSAGE_COUNT = "messaging.message.id", "messaging.batch.message_count"
FUNCTION, ERROR_TYPE = "code.function.name", "error.type"
#: These two are ours: the conventions have no names for them.
ATTEMPT, OUTCOME = "django_pglock.attempt", "django_pglock.outcome"
#: The bounds of buckets that the conventions advise, in seconds, and some for longer tasks.
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 30, 60, 300, 1800, 7200)

#: The failure of an attempt that has lost its task while it ran.
CLAIM_LOST = Failure("django_pglock.errors.ClaimLost", "", "The task no longer belongs to this worker.")


class PGLockInstrumentor(BaseInstrumentor):  # type: ignore[misc]
    """Switches spans and metrics of this package on and off, like any instrumentor of OpenTelemetry.

    ``instrument()`` takes ``tracer_provider`` and ``meter_provider``; default: the global ones.
    """

    def instrumentation_dependencies(self) -> Sequence[str]:
        """Return no packages, because the instrumentor is part of the package that it instruments."""
        return ()

    def _instrument(self, **kwargs: Any) -> None:
        tracers, meters = kwargs.get("tracer_provider"), kwargs.get("meter_provider")
        tracer = trace.get_tracer(__name__, __version__, tracers, schema_url=SCHEMA_URL)
        instrumentation.add(Telemetry(tracer, metrics.get_meter(__name__, __version__, meters, schema_url=SCHEMA_URL)))

    def _uninstrument(self, **kwargs: Any) -> None:
        instrumentation.remove(NAME)


class Telemetry:
    """The instrument: a tracer, and the four metrics."""

    name = NAME

    def __init__(self, tracer: Tracer, meter: Meter) -> None:
        self.tracer = tracer
        messages = partial(meter.create_counter, unit="{message}")
        seconds = partial(meter.create_histogram, unit="s", explicit_bucket_boundaries_advisory=BUCKETS)
        self.sent = messages("messaging.client.sent.messages", description="Tasks that were enqueued.")
        self.send_duration = seconds("messaging.client.operation.duration", description="Time that it took to enqueue.")
        self.consumed = messages("messaging.client.consumed.messages", description="Attempts of tasks that began.")
        self.process_duration = seconds("messaging.process.duration", description="Time for which task functions ran.")

    def enqueuing(self, task: TaskFields) -> EnqueueObserver:
        """Begin a span of the kind PRODUCER, a child of the caller's span."""
        return Sending(self, task)

    def running(self, attempt: AttemptInfo) -> RunObserver:
        """Begin a span of the kind CONSUMER, linked to those that have enqueued the tasks."""
        return Processing(self, attempt)


class Operation:
    """An operation with its span, which is current from ``enter()`` to ``leave()``."""

    token: Token[Context]

    def __init__(self, tracer: Tracer, operation: str, path: str, queue: str, **options: Any) -> None:
        self.labels = {
            SYSTEM: "postgresql",
            OPERATION_NAME: operation,
            OPERATION_TYPE: operation,
            QUEUE: queue,
            FUNCTION: path,
        }
        details = options.pop("attributes", {})
        self.span = tracer.start_span(f"{operation} {queue}", attributes={**self.labels, **details}, **options)
        self.began = time.perf_counter()

    def enter(self, current: Context) -> None:
        """Make the span and its context current. The last step of the begin: only an operation that began can end."""
        self.token = context.attach(current)

    def leave(self) -> float:
        """End the span; return the seconds since its begin."""
        context.detach(self.token)
        self.span.end()
        return time.perf_counter() - self.began

    def fail(self, kind: str, message: str, traceback: str) -> None:
        """Set the status of the span and add the event of an exception, by its path, message and traceback."""
        self.labels[ERROR_TYPE] = kind
        self.span.set_attribute(ERROR_TYPE, kind)
        self.span.set_status(Status(StatusCode.ERROR, message))
        values = {"exception.type": kind, "exception.message": message, "exception.stacktrace": traceback}
        self.span.add_event("exception", values)


class Sending(Operation, EnqueueObserver):
    """A call that enqueues."""

    def __init__(self, telemetry: Telemetry, task: TaskFields) -> None:
        super().__init__(telemetry.tracer, "send", task.module_path, task.queue_name, kind=SpanKind.PRODUCER)
        self.telemetry = telemetry
        self.headers: dict[str, str] = {}
        current = trace.set_span_in_context(self.span)
        if not own_headers(task.meta):
            propagate.inject(self.headers, current)
        self.enter(current)

    def ended(self, ids: Sequence[str], error: BaseException | None) -> None:
        """End the span."""
        if error is not None:
            path, traceback = describe_exception(error)
            self.fail(path, message_of(error), traceback)
        else:
            self.span.set_attributes({MESSAGE_ID: ids[0]} if len(ids) == 1 else {MESSAGE_COUNT: len(ids)})
        seconds = self.leave()
        self.telemetry.sent.add(len(ids) if error is None else 1, self.labels)
        self.telemetry.send_duration.record(seconds, self.labels)


class Processing(Operation, RunObserver):
    """An attempt that runs."""

    def __init__(self, telemetry: Telemetry, attempt: AttemptInfo) -> None:
        claims = attempt.claims
        first = claims[0]
        callers = [caller_of(claim) for claim in claims]
        spans = [trace.get_current_span(caller).get_span_context() for caller in callers]
        super().__init__(
            telemetry.tracer,
            "process",
            first.task_path,
            first.queue,
            kind=SpanKind.CONSUMER,
            links=[Link(span) for span in spans if span.is_valid],
            attributes={
                **({MESSAGE_ID: str(first.id)} if len(claims) == 1 else {MESSAGE_COUNT: len(claims)}),
                CLIENT: str(first.worker),
                ATTEMPT: first.number,
            },
        )
        self.telemetry = telemetry
        # A call for several tasks has several callers, and belongs to none of them.
        current = trace.set_span_in_context(self.span)
        for name, value in baggage.get_all(callers[0]).items() if len(claims) == 1 else ():
            current = baggage.set_baggage(name, value, current)
        self.enter(current)
        telemetry.consumed.add(len(claims), self.labels)

    def ended(self, outcome: Any) -> None:
        """End the span."""
        name = "lost" if outcome is None else type(outcome).__name__.lower()
        self.span.set_attribute(OUTCOME, name)
        failure = CLAIM_LOST if outcome is None else getattr(outcome, "failure", None)
        if failure is not None and not isinstance(outcome, Cancelled):
            self.fail(failure.exception_path, failure.message, failure.traceback)
        self.telemetry.process_duration.record(self.leave(), {**self.labels, OUTCOME: name})


def caller_of(claim: Claim) -> Context:
    """Return the context of the call that has enqueued a task; empty if none was stored."""
    headers = headers_of(claim.meta, NAME) or (own_headers(from_json(claim.meta)) if claim.meta != "{}" else {})
    return propagate.extract(headers, Context())


def own_headers(meta: Any) -> dict[str, str]:
    """Return the headers that a project itself has put into ``meta``. They have precedence over those of the span."""
    fields = propagate.get_global_textmap().fields
    return {name: meta[name] for name in fields if isinstance(meta.get(name), str)} if isinstance(meta, dict) else {}
