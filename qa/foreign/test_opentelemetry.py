"""OpenTelemetry's SDK with our own instrumentor: spans, links, baggage and metrics of tasks.

Beside it are the instrumentors of psycopg and of Django. That of psycopg makes a span of each ``execute()`` of its own
cursor class, which comes in when psycopg connects. The middleware of Django's pushes an execute wrapper that puts a
comment behind each statement; the wrapper ends before a streamed response has.
"""

from __future__ import annotations

import asyncio
from importlib import import_module
from importlib.metadata import entry_points

import pytest
from django.db import connection
from django.test import Client
from opentelemetry import baggage, context, metrics, trace
from opentelemetry.instrumentation.django import DjangoInstrumentor
from opentelemetry.instrumentation.psycopg import PsycopgInstrumentor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from django_pglock import DuplicateTask, Group, Snooze, TaskContext, Unique, aenqueue_many, enqueue_many, task
from django_pglock.contrib.opentelemetry import PGLockInstrumentor
from django_pglock.models import Schedule, Task
from django_pglock.postgres.sessions import dedicated_connection
from qa.foreign.sample.models import Letter
from qa.foreign.sample.tasks import nothing

exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
reader = InMemoryMetricReader()
trace.set_tracer_provider(provider)
PsycopgInstrumentor().instrument(tracer_provider=provider)
DjangoInstrumentor().instrument(tracer_provider=provider, is_sql_commentor_enabled=True)
meters = MeterProvider([reader])
metrics.set_meter_provider(meters)
import_module("qa.foreign.snippets.opentelemetry_setup")
tracer = trace.get_tracer(__name__)

USER_TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@task
def count_letters() -> list[object]:
    return [Letter.objects.count(), baggage.get_baggage("tenant")]


@task(atomic=True)
def write_letter() -> object:
    Letter.objects.create(text="traced")
    return baggage.get_baggage("tenant")


@task
async def count_later() -> list[object]:
    return [await Letter.objects.acount(), baggage.get_baggage("tenant")]


@task(max_attempts=2, backoff=0)
def fail(*, how: str) -> None:
    if how == "snooze":
        raise Snooze(0)
    raise LookupError("the letter is gone")


@task(group=Group("all", limit=10))
def together(calls: list[dict[str, int]]) -> object:
    return [len(calls), baggage.get_baggage("tenant")]


@task(takes_context=True)
def see_meta(context: TaskContext) -> dict[str, object]:
    return context.meta


@task(unique=Unique(on_conflict="raise"))
def once() -> None: ...


@task(atomic=True, takes_context=True)
def lose(context: TaskContext) -> None:
    """Let another session end the task meanwhile."""
    other = dedicated_connection("default")
    with other.cursor() as cursor:
        end = "UPDATE django_pglock_task SET status = 'CANCELLED', finished_at = clock_timestamp() WHERE id = %s"
        cursor.execute(end, [context.task_result.id])
    other.close()


def measure(name: str) -> str:
    with tracer.start_as_current_span("inside"):
        return name


def refuse(name: str) -> str:
    raise LookupError(f"{name} is refused")


async def measure_later(name: str) -> str:
    return measure(name)


@task(takes_context=True, max_attempts=2, backoff=0)
def in_steps(context: TaskContext) -> None:
    context.step("one", measure, "one")
    context.atomic_step("two", measure, "two")
    context.step("three", refuse, "three")


@task(takes_context=True)
async def in_one_step(context: TaskContext) -> None:
    await context.astep("one", measure_later, "one")


@task(every=3600)
def by_the_clock() -> None: ...


@pytest.fixture(autouse=True)
def no_spans(no_schedules):
    connection.ensure_connection()
    exporter.clear()


def spans(operation: str) -> list[ReadableSpan]:
    found = [each for each in exporter.get_finished_spans() if each.attributes.get("messaging.operation.name")]
    return [each for each in found if each.attributes["messaging.operation.name"] == operation]


def ids(span: ReadableSpan) -> tuple[int, int]:
    return span.context.trace_id, span.context.span_id


def linked(span: ReadableSpan) -> set[tuple[int, int]]:
    return {(each.context.trace_id, each.context.span_id) for each in span.links}


def statements(text: str) -> list[ReadableSpan]:
    return [each for each in exporter.get_finished_spans() if text in str(each.attributes.get("db.statement"))]


def with_baggage(function, *args, **kwargs):
    """Call a function inside of a span of a caller that has baggage."""
    token = context.attach(baggage.set_baggage("tenant", "acme"))
    try:
        with tracer.start_as_current_span("caller"):
            return function(*args, **kwargs)
    finally:
        context.detach(token)


@pytest.mark.parametrize("function", [count_letters, write_letter, count_later], ids=["sync", "atomic", "async"])
def test_a_run_is_a_trace_of_its_own_with_a_link_to_the_call(function, drain):
    result = with_baggage(function.using(queue_name="letters").enqueue)
    [send] = spans("send")
    [caller] = [each for each in exporter.get_finished_spans() if each.name == "caller"]
    assert (send.name, send.kind, send.parent.span_id) == ("send letters", SpanKind.PRODUCER, caller.context.span_id)
    assert statements('INSERT INTO "django_pglock_task"')[0].parent.span_id == send.context.span_id
    drain()
    [process] = spans("process")
    assert (process.name, process.kind, process.parent) == ("process letters", SpanKind.CONSUMER, None)
    assert linked(process) == {ids(send)}
    assert process.context.trace_id != send.context.trace_id
    assert dict(process.attributes) == {
        "messaging.system": "postgresql",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "letters",
        "messaging.message.id": result.id,
        "messaging.client.id": process.attributes["messaging.client.id"],
        "code.function.name": function.module_path,
        "django_pglock.attempt": 1,
        "django_pglock.outcome": "succeeded",
    }
    [inside] = statements('"sample_letter"')
    assert inside.parent.span_id == process.context.span_id
    result.refresh()
    assert "acme" in (result.return_value if isinstance(result.return_value, list) else [result.return_value])


def test_a_failure_and_a_retry_are_two_attempts_with_the_exception(drain):
    fail.enqueue(how="error")
    drain()
    [send] = spans("send")
    first, second = spans("process")
    assert [each.attributes["django_pglock.outcome"] for each in (first, second)] == ["retried", "failed"]
    assert [each.attributes["django_pglock.attempt"] for each in (first, second)] == [1, 2]
    for span in (first, second):
        assert linked(span) == {ids(send)}
        assert (span.status.status_code, span.attributes["error.type"]) == (StatusCode.ERROR, "builtins.LookupError")
        [event] = span.events
        assert event.attributes["exception.message"] == "LookupError: the letter is gone"
        assert "in fail" in event.attributes["exception.stacktrace"]


def test_each_step_that_is_executed_is_a_span_of_its_attempt(drain):
    """A recorded step is not executed again. A failed one is an error, also if its failure is recorded."""
    in_steps.enqueue()
    drain()
    steps = [each for each in exporter.get_finished_spans() if "django_pglock.step" in each.attributes]
    assert [each.name for each in steps] == ["step one", "step two", "step three", "step three"]
    first, second = spans("process")
    assert [each.parent.span_id for each in steps] == [*[first.context.span_id] * 3, second.context.span_id]
    inside = [each for each in exporter.get_finished_spans() if each.name == "inside"]
    assert [each.parent.span_id for each in inside] == [each.context.span_id for each in steps[:2]]
    assert [each.status.status_code is StatusCode.ERROR for each in steps] == [False, False, True, True]
    for each in steps[2:]:
        assert each.attributes["error.type"] == "builtins.LookupError"
        assert "three is refused" in each.status.description


def test_a_step_of_a_coroutine_is_a_span_of_its_attempt(drain):
    in_one_step.enqueue()
    drain()
    [step] = [each for each in exporter.get_finished_spans() if "django_pglock.step" in each.attributes]
    [inside] = [each for each in exporter.get_finished_spans() if each.name == "inside"]
    assert inside.parent.span_id == step.context.span_id
    assert step.parent.span_id == spans("process")[0].context.span_id


def test_to_snooze_is_no_error(drain):
    fail.using(max_snoozes=1).enqueue(how="snooze")
    drain()
    Task.objects.run_now()
    drain()
    first, second = spans("process")
    assert (first.status.status_code, first.attributes["django_pglock.outcome"]) == (StatusCode.UNSET, "snoozed")
    assert second.attributes["error.type"].endswith(".TooManySnoozes")


def test_an_attempt_that_has_lost_its_task_is_an_error(drain):
    lose.enqueue()
    drain()
    [process] = spans("process")
    assert (process.status.status_code, process.attributes["django_pglock.outcome"]) == (StatusCode.ERROR, "lost")
    assert process.attributes["error.type"] == "django_pglock.errors.ClaimLost"


@pytest.mark.parametrize("enqueue", [enqueue_many, aenqueue_many])
def test_many_calls_have_one_span(enqueue, drain):
    written = enqueue(nothing, [{"number": 1}, {"number": 2}])
    written = written if isinstance(written, list) else asyncio.run(written)
    drain()
    [send] = spans("send")
    assert send.attributes["messaging.batch.message_count"] == 2
    runs = spans("process")
    assert sorted(each.attributes["messaging.message.id"] for each in runs) == sorted(written)
    assert [linked(each) for each in runs] == [{ids(send)}] * 2


def test_a_group_has_links_to_all_its_calls(drain):
    results = [with_baggage(together.enqueue, number=number) for number in range(3)]
    drain()
    [process] = spans("process")
    assert linked(process) == {ids(send) for send in spans("send")}
    assert process.attributes["messaging.batch.message_count"] == 3
    results[0].refresh()
    # The call serves three callers, and has the baggage of none.
    assert results[0].return_value == [3, None]


def test_a_trace_that_the_project_puts_into_meta_is_the_callers(drain):
    result = see_meta.using(meta={"traceparent": USER_TRACE, "order": 7}).enqueue()
    drain()
    [process] = spans("process")
    assert format(process.links[0].context.trace_id, "032x") == USER_TRACE.split("-")[1]
    result.refresh()
    assert result.return_value == {"traceparent": USER_TRACE, "order": 7}


def test_a_row_that_another_program_has_written_runs_without_a_link(drain):
    Task.objects.filter(pk=nothing.enqueue().id).update(meta={"headers": {"opentelemetry": 3}, "traceparent": 5})
    drain()
    [process] = spans("process")
    assert not process.links


def test_a_schedule_sends_too(drain):
    drain()
    Schedule.objects.filter(task_path=by_the_clock.module_path).run_now()
    drain()
    [send], [process] = spans("send"), spans("process")
    assert send.attributes["code.function.name"] == by_the_clock.module_path
    assert linked(process) == {ids(send)}


def test_a_request_is_the_parent_of_its_locks_and_calls():
    assert Client().get("/post/", {"text": "100%"}).status_code == 200
    [request] = [each for each in exporter.get_finished_spans() if each.kind == SpanKind.SERVER]
    [send] = spans("send")
    for text, parent in (("advisory_lock", request), ("advisory_unlock", request), ("INSERT INTO", send)):
        found = [each for each in statements(text) if "sample_letter" not in each.attributes["db.statement"]]
        assert found
        assert all(each.parent.span_id == parent.context.span_id for each in found), text
        # The middleware adds the origin to all of these statements.
        assert all("framework='django" in each.attributes["db.statement"] for each in found), text
    assert send.parent.span_id == request.context.span_id


def test_an_enqueue_that_is_refused_is_an_error():
    once.enqueue()
    with pytest.raises(DuplicateTask):
        once.enqueue()
    accepted, refused = spans("send")
    assert accepted.status.status_code == StatusCode.UNSET
    assert refused.attributes["error.type"] == "django_pglock.errors.DuplicateTask"
    assert not trace.get_current_span().is_recording()


def test_metrics_have_the_names_of_the_conventions(drain):
    queue = "measured"
    nothing.using(queue_name=queue).enqueue()
    fail.using(queue_name=queue, max_attempts=1).enqueue(how="error")
    drain()
    measured = {
        metric.name: (metric.unit, [point for point in metric.data.data_points if queue in point.attributes.values()])
        for scope in reader.get_metrics_data().resource_metrics[0].scope_metrics
        for metric in scope.metrics
        if metric.name.startswith("messaging.")
    }
    assert {name: unit for name, (unit, _) in measured.items()} == {
        "messaging.client.sent.messages": "{message}",
        "messaging.client.consumed.messages": "{message}",
        "messaging.client.operation.duration": "s",
        "messaging.process.duration": "s",
    }
    for name in ("messaging.client.sent.messages", "messaging.client.consumed.messages"):
        assert [point.value for point in measured[name][1]] == [1, 1]
    runs = {point.attributes.get("error.type"): point.count for point in measured["messaging.process.duration"][1]}
    assert runs == {None: 1, "builtins.LookupError": 1}


class Broken(SpanProcessor):
    """Raises at the begin and at the end of each of our spans."""

    def on_start(self, span, parent_context=None):
        if span.name.endswith("begin"):
            raise RuntimeError("on_start")

    def on_end(self, span):
        if span.name.endswith("end"):
            raise RuntimeError("on_end")


@pytest.mark.parametrize("queue", ["begin", "end"])
def test_a_span_processor_that_raises_harms_no_task_and_no_caller(queue, drain, caplog):
    broken = TracerProvider()
    broken.add_span_processor(Broken())
    PGLockInstrumentor().uninstrument()
    PGLockInstrumentor().instrument(tracer_provider=broken)
    try:
        result = nothing.using(queue_name=queue).enqueue()
        assert not trace.get_current_span().get_span_context().is_valid
        drain()
    finally:
        PGLockInstrumentor().uninstrument()
        PGLockInstrumentor().instrument()
    result.refresh()
    assert result.status == "SUCCESSFUL"
    assert [each.message for each in caplog.records if each.name == "django_pglock.tasks"]


def test_without_the_instrumentor_no_spans_and_headers_are_made(drain):
    PGLockInstrumentor().uninstrument()
    try:
        result = nothing.enqueue()
        assert Task.objects.get(pk=result.id).meta == {}
        drain()
    finally:
        PGLockInstrumentor().instrument()
    assert spans("send") == spans("process") == []


def test_opentelemetry_instrument_finds_the_instrumentor():
    [found] = entry_points(group="opentelemetry_instrumentor", name="django_pglock")
    assert found.load() is PGLockInstrumentor
