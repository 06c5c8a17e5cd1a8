"""OpenTelemetry: psycopg's instrumentation makes a span of each ``execute()`` of its own cursor class.

The class comes in when psycopg connects. Django's instrumentation makes a span of each request, and with
``is_sql_commentor_enabled`` its middleware pushes an execute wrapper that puts a comment behind each statement; the
wrapper ends before a streamed response has.
"""

from __future__ import annotations

import pytest
from django.db import connection
from django.test import Client
from opentelemetry import trace
from opentelemetry.instrumentation.django import DjangoInstrumentor
from opentelemetry.instrumentation.psycopg import PsycopgInstrumentor
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from django_pglock import lock, task
from django_pglock.models import AdvisoryLock, Task
from qa.foreign.sample.models import Letter

exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
PsycopgInstrumentor().instrument(tracer_provider=provider)
DjangoInstrumentor().instrument(tracer_provider=provider, is_sql_commentor_enabled=True)
tracer = trace.get_tracer(__name__)


@task
def count_letters() -> int:
    return Letter.objects.count()


@pytest.fixture(autouse=True)
def no_spans(no_tasks):
    connection.ensure_connection()
    exporter.clear()


def statement_of(span: ReadableSpan) -> str:
    attributes = span.attributes or {}
    return str(attributes.get("db.statement") or attributes.get("db.query.text") or "")


def spans_of(text: str) -> list[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if text in statement_of(span)]


def test_a_lock_has_a_span_for_each_statement():
    with tracer.start_as_current_span("work") as work, lock("traced"):
        Letter.objects.count()
    [taken] = spans_of("_advisory_lock(")
    [freed] = spans_of("pg_advisory_unlock")
    [between] = spans_of("COUNT(*)")
    assert taken.parent.span_id == freed.parent.span_id == between.parent.span_id == work.get_span_context().span_id
    assert taken.end_time <= between.start_time <= between.end_time <= freed.start_time


def test_a_worker_has_spans(drain):
    result = count_letters.enqueue()
    exporter.clear()
    drain()
    result.refresh()
    assert result.status == "SUCCESSFUL"
    assert spans_of("COUNT(*)")
    assert spans_of('"django_pglock_task"')


def test_a_request_is_the_parent_of_its_locks_and_calls():
    assert Client().get("/post/", {"text": "100%"}).status_code == 200
    [request] = [span for span in exporter.get_finished_spans() if span.kind == trace.SpanKind.SERVER]
    for text in ("advisory_lock", "advisory_unlock", "INSERT INTO"):
        spans = spans_of(text)
        assert spans
        assert all(span.parent.span_id == request.context.span_id for span in spans), text
        # The middleware adds the origin to all of these statements.
        assert all("framework='django" in statement_of(span) for span in spans), text
    assert Task.objects.count() == 1


def test_a_stream_outlasts_the_middleware_that_comments():
    for number in range(3):
        Letter.objects.create(text=str(number))
        connection.ensure_connection()
        before = [*connection.execute_wrappers]
        response = Client().get("/export/")
        assert len(b"".join(response.streaming_content).split()) == Letter.objects.count()
        response.close()
        assert not AdvisoryLock.objects.held().exists()
        assert connection.execute_wrappers == before
    exporter.clear()
    Letter.objects.count()
    [span] = spans_of("COUNT(*)")
    assert "framework=" not in statement_of(span)
