"""Sentry: its Django integration replaces ``CursorWrapper.execute`` and ``Task.enqueue`` by functions that make spans.

Both are replaced on Django's classes when the SDK starts. It sees nothing of a class with
an ``execute`` or an ``enqueue`` of its own.
"""

from __future__ import annotations

from typing import Any

import pytest
import sentry_sdk
from django.core.handlers.wsgi import WSGIHandler
from django.db import connection
from django.test import RequestFactory
from sentry_sdk.consts import OP
from sentry_sdk.envelope import Envelope
from sentry_sdk.integrations.django import DjangoIntegration
from sentry_sdk.transport import Transport

from django_pglock import lock, task
from qa.foreign.sample.tasks import nothing

events: list[dict[str, Any]] = []


def keep(event: Any, hint: Any) -> Any:
    """Capture the events. A dropped event would not count as seen, and would come twice."""
    events.append(event)
    return event


class Nowhere(Transport):
    """Sends nothing."""

    def capture_envelope(self, envelope: Envelope) -> None: ...


sentry_sdk.init(
    dsn="http://key@127.0.0.1/1",
    transport=Nowhere,
    traces_sample_rate=1.0,
    before_send=keep,
    before_send_transaction=keep,
    auto_enabling_integrations=False,
    integrations=[DjangoIntegration()],
)


@task
def fail() -> None:
    raise LookupError("the letter is gone")


@pytest.fixture(autouse=True)
def no_events(no_tasks):
    connection.ensure_connection()
    events.clear()


def spans(op: str, text: str = "") -> list[dict[str, Any]]:
    found = [span for event in events for span in event.get("spans", [])]
    return [span for span in found if span["op"] == op and text in span["description"]]


def test_locks_have_spans():
    with sentry_sdk.start_transaction(name="work"), lock("traced", "100%"):
        pass
    assert len(spans("db", "_advisory_lock(")) == 1
    assert len(spans("db", "pg_advisory_unlock")) == 1


def test_a_call_has_a_span_of_the_queue():
    with sentry_sdk.start_transaction(name="work"):
        nothing.enqueue()
        nothing.using(priority=5).enqueue()
    published = spans(OP.QUEUE_SUBMIT_DJANGO)
    assert [span["description"] for span in published] == ["qa.foreign.sample.tasks.nothing"] * 2


def test_a_request_has_the_spans_of_its_locks_and_calls():
    # The integration begins a transaction in WSGIHandler, which Django's test client leaves out.
    response = WSGIHandler()(RequestFactory().get("/post/").environ, lambda status, headers: None)
    assert b"".join(response) == b"posted"
    response.close()
    assert len(spans("db", "advisory_lock")) == 1
    assert len(spans("db", "advisory_unlock")) == 1
    assert len(spans("db", 'INSERT INTO "django_pglock_task"')) == 1
    assert len(spans(OP.QUEUE_SUBMIT_DJANGO)) == 1


def test_a_task_that_fails_is_an_event(drain):
    """Sentry's logging integration makes one event of it, although the worker and Django both log it.

    The event has the exception, by whose frames Sentry groups: the function's, and none of the worker's.
    """
    result = fail.enqueue()
    drain()
    result.refresh()
    assert result.status == "FAILED"
    [event] = [event for event in events if event.get("level") == "error"]
    assert event["logger"] == "django_pglock.worker"
    assert event["extra"]["task_path"].endswith(".fail")
    [exception] = event["exception"]["values"]
    assert (exception["type"], exception["value"]) == ("LookupError", "the letter is gone")
    assert [frame["function"] for frame in exception["stacktrace"]["frames"]] == ["fail"]
