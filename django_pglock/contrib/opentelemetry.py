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
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from opentelemetry import baggage, context, metrics, propagate, trace
from opentelemetry.context import Context
from opentelemetry.instrumentation.instrumentor import BaseInstrumentor
from opentelemetry.metrics import Histogram, Meter
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, Tracer

from django_pglock import __version__
from django_pglock.store.outcome import Cancelled, Failure
from django_pglock.tasks import instrumentation
from django_pglock.tasks.arguments import from_json
from django_pglock.tasks.claim import Claim
from django_pglock.tasks.fields import TaskFields
from django_pglock.tasks.instrumentation import headers_of

NAME = "opentelemetry"
SCHEMA_URL = "https://opentelemetry.io/schemas/1.37.0"
SYSTEM, OPERATION_NAME, OPERATION_TYPE = "messaging.system", "messaging.operation.name", "messaging.operation.type"
QUEUE, CLIENT = "messaging.destination.name", "messaging.client.id"
MESSAGE_ID, MESSAGE_COUNT = "messaging.message.id", "messaging.batch.message_count"
FUNCTION, ERROR_TYPE = "code.function.name", "error.type"
#: These are ours: the conventions have no names for them.
ATTEMPT, OUTCOME, STEP = "django_pglock.attempt", "django_pglock.outcome", "django_pglock.step"
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

    def enqueuing(self, task: TaskFields) -> Generator[Any, Any, None]:
        """Observe by a span of the kind PRODUCER, a child of the caller's span."""
        labels = labels_of("send", task.module_path, task.queue_name)
        with self._span(labels, {}, self.send_duration, kind=SpanKind.PRODUCER) as span:
            headers: dict[str, str] = {}
            if not own_headers(task.meta):
                propagate.inject(headers)
            ids, error = yield headers
            if error is None:
                span.set_attributes(messages_of(ids))
            else:
                fail(span, labels, Failure.of(error))
        self.sent.add(len(ids) if error is None else 1, labels)

    def running(self, attempt: Any) -> Generator[Any, Any, None]:
        """Observe by a span of the kind CONSUMER, linked to those that have enqueued the tasks."""
        claims: list[Claim] = attempt.claims
        first, callers = claims[0], [caller_of(claim) for claim in claims]
        spans = [trace.get_current_span(caller).get_span_context() for caller in callers]
        labels = labels_of("process", first.task_path, first.queue)
        about = {**messages_of([str(claim.id) for claim in claims]), CLIENT: str(first.worker), ATTEMPT: first.number}
        links = [Link(span) for span in spans if span.is_valid]
        with self._span(labels, about, self.process_duration, kind=SpanKind.CONSUMER, links=links) as span:
            # A call for several tasks has several callers, and belongs to none of them.
            for name, value in baggage.get_all(callers[0]).items() if len(claims) == 1 else ():
                # Without a detach: that of the span restores the context from before both.
                context.attach(baggage.set_baggage(name, value))
            self.consumed.add(len(claims), labels)
            outcome = yield
            labels[OUTCOME] = "lost" if outcome is None else type(outcome).__name__.lower()
            span.set_attribute(OUTCOME, labels[OUTCOME])
            failure = CLAIM_LOST if outcome is None else getattr(outcome, "failure", None)
            if failure is not None and not isinstance(outcome, Cancelled):
                fail(span, labels, failure)

    def stepping(self, name: str) -> Generator[Any, Any, None]:
        """Observe by a span inside that of the attempt."""
        with self.tracer.start_as_current_span(f"step {name}", attributes={STEP: name}) as span:
            failure = yield
            if failure is not None:
                fail(span, {}, Failure(failure["path"], "", failure["message"]))

    @contextmanager
    def _span(
        self, labels: dict[str, str], about: Mapping[str, Any], duration: Histogram, **options: Any
    ) -> Iterator[Span]:
        """Make a span current in a block, and record how long the block took."""
        name, attributes = f"{labels[OPERATION_NAME]} {labels[QUEUE]}", {**labels, **about}
        began = time.perf_counter()
        with self.tracer.start_as_current_span(name, attributes=attributes, **options) as span:
            yield span
        duration.record(time.perf_counter() - began, labels)


def labels_of(operation: str, path: str, queue: str) -> dict[str, str]:
    """Return the attributes that the span and the metrics of an operation have."""
    kind = {OPERATION_NAME: operation, OPERATION_TYPE: operation}
    return {SYSTEM: "postgresql", **kind, QUEUE: queue, FUNCTION: path}


def messages_of(ids: Sequence[str]) -> dict[str, Any]:
    """Return the attribute of one task, or of several."""
    return {MESSAGE_ID: ids[0]} if len(ids) == 1 else {MESSAGE_COUNT: len(ids)}


def fail(span: Span, labels: dict[str, str], failure: Failure) -> None:
    """Set the status of a span, and add the event of an exception."""
    labels[ERROR_TYPE] = failure.exception_path
    span.set_attribute(ERROR_TYPE, failure.exception_path)
    span.set_status(Status(StatusCode.ERROR, failure.message))
    values = {"type": failure.exception_path, "message": failure.message, "stacktrace": failure.traceback}
    span.add_event("exception", {f"exception.{name}": value for name, value in values.items()})


def caller_of(claim: Claim) -> Context:
    """Return the context of the call that has enqueued a task; empty if none was stored."""
    headers = headers_of(claim.meta, NAME) or (own_headers(from_json(claim.meta)) if claim.meta != "{}" else {})
    return propagate.extract(headers, Context())


def own_headers(meta: Any) -> dict[str, str]:
    """Return the headers that a project itself has put into ``meta``. They have precedence over those of the span."""
    fields = propagate.get_global_textmap().fields
    return {name: meta[name] for name in fields if isinstance(meta.get(name), str)} if isinstance(meta, dict) else {}
