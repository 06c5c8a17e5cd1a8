"""Sentry's SDK with our integration: issues, traces and check-ins of tasks, as a transport gets them."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from importlib import import_module
from typing import Any

import pytest
import sentry_sdk
from django.db import connection
from sentry_sdk.envelope import Envelope
from sentry_sdk.integrations.django import DjangoIntegration
from sentry_sdk.transport import Transport

from django_pglock import Cancel, Retry, Snooze, enqueue_many, task
from django_pglock.contrib.sentry import PGLockIntegration, slug_of
from django_pglock.models import Schedule, Task
from django_pglock.store.schedules import ScheduleKeeper
from qa.foreign.sample.tasks import nothing

collected: list[tuple[str, dict[str, Any]]] = []


class Collected(Transport):
    """Keeps what would be sent."""

    def capture_envelope(self, envelope: Envelope) -> None:
        collected.extend((item.type, item.payload.json) for item in envelope.items)


def start(*, trace_lifecycle: str = "static", queues: bool = True, **options: Any) -> None:
    sentry_sdk.init(
        dsn="http://key@127.0.0.1/1",
        transport=Collected,
        traces_sample_rate=1.0,
        data_collection={"queues": queues},
        auto_enabling_integrations=False,
        integrations=[DjangoIntegration(), PGLockIntegration(**options)],
        trace_lifecycle=trace_lifecycle,
    )


@task
def fail(order: int, note: str = "") -> None:
    found = order + 1
    raise LookupError(f"order {order} of {found} is gone")


@task(group="orders")
def fail_some(calls: Any) -> None:
    for call in calls:
        if call["order"] % 2:
            calls.fail(call, LookupError(f"order {call['order']} is gone"))


@task(redact=("card",))
def fail_in_secret(order: int, card: str) -> None:
    try:
        charge(card)
    except LookupError:
        sentry_sdk.capture_exception()
        raise


def charge(number: str) -> None:
    raise LookupError("no money")


@task(max_attempts=2, backoff=0)
def fail_twice(order: int = 0) -> None:
    raise LookupError("the letter is gone")


@task(max_attempts=2, backoff=0)
async def fail_later() -> None:
    await asyncio.sleep(0)
    raise LookupError("the letter is gone")


@task(takes_context=True)
def in_steps(context: Any) -> None:
    context.step("one", str, "one")
    context.atomic_step("two", charge, "two")


@task
def end_by(word: str) -> None:
    raise Cancel("unwanted") if word == "cancel" else Snooze(0)


@task(timeout=0.05)
def take_too_long() -> None:
    time.sleep(0.2)


@task
def say(text: str) -> None:
    sentry_sdk.capture_message(text)


@task(cron="*/5 * * * *", timezone="Europe/Berlin", max_attempts=2, backoff=0)
def nightly(outcomes: list[bool] = [False, True]) -> None:  # noqa: B006 - shared on purpose
    if not outcomes.pop(0):
        raise Retry(after=0)


@task(every=timedelta(hours=2))
def every_two_hours() -> None:
    raise LookupError("the letter is gone")


@task(every=90)
def too_often_for_sentry() -> None: ...


@pytest.fixture(autouse=True)
def sentry(no_schedules):
    connection.ensure_connection()
    start()
    collected.clear()


def items(kind: str) -> list[dict[str, Any]]:
    sentry_sdk.flush()
    return [payload for type_, payload in collected if type_ == kind]


def runs() -> list[dict[str, Any]]:
    return [each for each in items("transaction") if each["contexts"]["trace"]["op"] == "queue.process"]


def test_a_failure_is_one_issue_with_its_task(drain):
    result = fail.using(queue_name="bank").enqueue(7, note="late")
    drain()
    [event] = items("event")
    assert event["fingerprint"] == [fail.module_path, "builtins.LookupError"]
    assert event["transaction"] == fail.module_path
    assert event["contexts"]["task"] == {
        "id": result.id,
        "function": fail.module_path,
        "queue": "bank",
        "attempt": 1,
        "args": [7],
        "kwargs": {"note": "late"},
    }
    assert (event["tags"]["task_id"], event["tags"]["queue"]) == (result.id, "bank")
    [exception] = event["exception"]["values"]
    assert (exception["type"], exception["value"]) == ("LookupError", "order 7 of 8 is gone")
    assert exception["mechanism"] == {"type": "django_pglock", "handled": False}
    [frame] = exception["stacktrace"]["frames"]
    assert (frame["function"], frame["vars"]["found"]) == ("fail", "8")


def test_each_call_of_a_group_that_has_failed_by_itself_is_reported_with_its_task(drain):
    ids = enqueue_many(fail_some, [{"order": number} for number in range(4)])
    drain()
    found = {event["contexts"]["task"]["id"]: event for event in items("event")}
    assert sorted(found) == [ids[1], ids[3]]
    assert found[ids[3]]["contexts"]["task"]["kwargs"] == {"order": 3}
    assert found[ids[3]]["tags"]["task_id"] == ids[3]
    assert found[ids[3]]["exception"]["values"][0]["value"] == "order 3 is gone"
    [run] = runs()
    assert run["contexts"]["trace"]["status"] == "ok"


def test_what_is_redacted_is_not_sent(drain):
    fail_in_secret.enqueue(7, card="no random text")
    drain()
    events = items("event")
    assert [event["contexts"]["task"]["kwargs"] for event in events] == [{"card": "[redacted]"}] * len(events)
    assert events
    assert "no random text" not in str(collected)


def test_arguments_are_sent_only_if_sentry_may_have_them(drain):
    start(queues=False)
    fail.enqueue(7)
    drain()
    [event] = items("event")
    assert "args" not in event["contexts"]["task"]


@pytest.mark.parametrize("function", [fail_twice, fail_later], ids=["sync", "async"])
def test_only_the_last_attempt_is_reported(function, drain):
    function.enqueue()
    drain()
    [event] = items("event")
    assert event["contexts"]["task"]["attempt"] == 2
    first, second = runs()
    assert [each["contexts"]["trace"]["status"] for each in (first, second)] == ["internal_error"] * 2


def test_cancel_and_snooze_are_no_failures(drain):
    end_by.enqueue("cancel")
    end_by.using(max_snoozes=1).enqueue("snooze")
    drain()
    Task.objects.run_now()
    drain()
    [event] = items("event")
    assert event["fingerprint"][1].endswith(".TooManySnoozes")


def test_a_timeout_is_reported_with_its_cause(drain):
    take_too_long.enqueue()
    drain()
    [event] = items("event")
    assert event["fingerprint"] == [take_too_long.module_path, "django_pglock.errors.TaskTimeout"]


def test_an_error_outside_of_the_function_is_still_an_event(drain):
    """The worker logs the error, and the logging integration of Sentry makes an event of the record."""

    Task.objects.filter(pk=nothing.enqueue().id).update(args={"no": "list"})
    drain()
    [event] = items("event")
    assert event["logger"] == "django_pglock.worker"


def test_a_message_of_the_function_has_the_task(drain):
    result = say.enqueue("hello")
    drain()
    [event] = items("event")
    assert (event["message"], event["tags"]["task_id"]) == ("hello", result.id)


def test_a_run_is_in_the_trace_of_the_call(drain):
    with sentry_sdk.start_transaction(name="work") as work:
        result = nothing.using(queue_name="letters").enqueue()
    drain()
    [caller] = [each for each in items("transaction") if each["transaction"] == "work"]
    [publish] = [span for span in caller["spans"] if span["op"] == "queue.publish"]
    assert publish["data"]["messaging.message.id"] == result.id
    [run] = runs()
    assert run["transaction"] == nothing.module_path
    assert run["contexts"]["trace"]["trace_id"] == work.trace_id
    assert run["contexts"]["trace"]["parent_span_id"] == publish["span_id"]
    data = run["contexts"]["trace"]["data"]
    assert data["messaging.destination.name"] == "letters"
    assert data["messaging.message.retry.count"] == 0
    assert data["messaging.message.receive.latency"] >= 0


def test_each_step_is_a_span_of_its_run(drain):
    in_steps.enqueue()
    drain()
    [run] = runs()
    steps = [(span["description"], span.get("status")) for span in run["spans"] if span["op"] == "function"]
    assert steps == [("step one", "ok"), ("step two", "internal_error")]


def test_spans_can_be_streamed(drain):
    start(trace_lifecycle="stream")
    with sentry_sdk.traces.start_span(name="work", parent_span=None) as work:
        result = nothing.enqueue()
    fail.enqueue(7)
    drain()
    spans = [span for payload in items("span") for span in payload["items"]]
    by_operation = {
        span["attributes"]["sentry.op"]["value"]: span for span in spans if "sentry.op" in span["attributes"]
    }
    publish = by_operation["queue.publish"]
    assert publish["attributes"]["messaging.message.id"]["value"] == result.id
    [run] = [each for each in spans if each["name"] == nothing.module_path and each.get("is_segment")]
    assert (run["trace_id"], run["parent_span_id"]) == (work.trace_id, publish["span_id"])
    [failed] = [each for each in spans if each["name"] == fail.module_path and each.get("is_segment")]
    assert failed["status"] == "error"
    assert len(items("event")) == 1


def ticks(*functions: Any) -> None:
    """Enqueue a tick of these schedules, and of no others."""
    chosen = Schedule.objects.filter(task_path__in=[each.module_path for each in functions])
    chosen.update(is_enabled=True, next_at="2026-01-01T00:00Z")
    assert len(ScheduleKeeper("default").keep().tasks) == len(functions)


def test_a_schedule_checks_in(drain):
    start(monitor_schedules=True)
    ticks(nightly)
    drain()
    begun, again, done = items("check_in")
    assert [each["status"] for each in (begun, again, done)] == ["in_progress", "in_progress", "ok"]
    # All attempts of a tick are one check-in.
    assert begun["check_in_id"] == again["check_in_id"] == done["check_in_id"]
    assert begun["monitor_slug"] == slug_of(nightly.module_path)
    schedule = {"type": "crontab", "value": "*/5 * * * *"}
    assert begun["monitor_config"] == {"schedule": schedule, "timezone": "Europe/Berlin"}


def test_a_schedule_that_fails_checks_in_with_an_error(drain):
    start(monitor_schedules=True)
    ticks(every_two_hours)
    drain()
    assert [each["status"] for each in items("check_in")] == ["in_progress", "error"]
    assert items("check_in")[0]["monitor_config"]["schedule"] == {"type": "interval", "value": 2, "unit": "hour"}


def test_what_sentry_cannot_monitor_does_not_check_in(drain):
    start(monitor_schedules=True)
    ticks(too_often_for_sentry)
    nothing.enqueue()
    drain()
    assert items("check_in") == []


def test_monitors_are_made_only_on_request(drain):
    ticks(every_two_hours)
    drain()
    assert items("check_in") == []


def test_the_lines_of_the_documentation_start_the_integration(monkeypatch):
    monkeypatch.setenv("SENTRY_DSN", "http://key@127.0.0.1/1")
    import_module("qa.foreign.snippets.sentry_setup")
    client = sentry_sdk.get_client()
    assert client.is_active()
    assert client.get_integration(PGLockIntegration).monitor_schedules
    client.close(timeout=0)


def test_a_slug_is_what_sentry_accepts():
    assert slug_of("shop.tasks.Nightly_report") == "shop-tasks-nightly_report"
    long, longer = slug_of(f"{'company.' * 9}nightly"), slug_of(f"{'company.' * 10}nightly")
    assert long != longer
    for slug in (long, longer):
        assert len(slug) <= 50
        assert slug.endswith("-company-nightly")
