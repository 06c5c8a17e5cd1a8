"""Results made from values, and the claims, states and classes behind them."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from importlib import import_module
from types import SimpleNamespace
from uuid import uuid4

import django
import pytest
from django.dispatch import Signal
from hypothesis import given
from hypothesis import strategies as st

from django_pglock.tasks import compat, results
from django_pglock.tasks.claim import LOG_FIELDS, Claim, date_of
from django_pglock.tasks.compat import TaskResultStatus
from django_pglock.tasks.results import PostgresTaskResult, as_called, error_of, make_result
from django_pglock.tasks.states import FINISHED, MOVES, WAITING, TaskStatus
from tests.sample import tasks


def result_of(**values):
    known = {"id": 7, "status": "READY", "args": [1], "kwargs": {}, "backend": "default", "enqueued_at": None}
    return make_result(tasks.echo, **{**known, **values})


def test_each_status_of_ours_is_one_of_djangos():
    public = {status: result_of(status=status.value).status for status in TaskStatus}
    waiting = {TaskStatus.SCHEDULED, TaskStatus.BLOCKED, TaskStatus.READY}
    assert {status for status in public if public[status] == TaskResultStatus.READY} == waiting
    assert public[TaskStatus.RUNNING] == TaskResultStatus.RUNNING
    assert public[TaskStatus.SUCCESSFUL] == TaskResultStatus.SUCCESSFUL
    assert public[TaskStatus.FAILED] == public[TaskStatus.CANCELLED] == TaskResultStatus.FAILED


def test_a_result_has_its_values_and_shows_no_arguments():
    result = result_of(
        status="SUCCESSFUL", args=["secret"], worker_ids=("a", "b"), errors=iter([error()]), return_value=0
    )
    assert isinstance(result, PostgresTaskResult)
    assert (result.id, result.return_value, result.worker_ids, len(result.errors)) == ("7", 0, ["a", "b"], 1)
    assert repr(result) == "<TaskResult 7 of tests.sample.tasks.echo SUCCESSFUL>"
    assert result_of(status="SUCCESSFUL").return_value is None


def error(path="builtins.ValueError"):
    return error_of(SimpleNamespace(exception_path=path, traceback="ValueError: no"))


def test_a_result_is_of_the_call_with_its_options():
    assert as_called(tasks.echo, priority=0, queue_name="default") is tasks.echo
    called = as_called(tasks.echo, priority=5, queue_name="default")
    assert (called.priority, called.func) == (5, tasks.echo.func)
    assert as_called(tasks.echo, priority=5000) is tasks.echo, "the settings or Django no longer allow it"


@pytest.mark.parametrize("why", ["", "no worker serves its queue"])
def test_a_wait_for_a_result_passes_its_remaining_time_and_fails_with_the_reason(monkeypatch, why):
    asked, moments = [], iter([100.0, 103.0])
    monkeypatch.setattr(results, "time", SimpleNamespace(monotonic=lambda: next(moments)))
    backend = SimpleNamespace(await_end=lambda *given: asked.append(given), why_unfinished=lambda id_: why)
    monkeypatch.setattr(PostgresTaskResult, "_backend", backend)
    with pytest.raises(TimeoutError) as timed_out:
        result_of().wait(10)
    assert str(timed_out.value) == f"Task 7 has not finished within 10 s{': ' if why else ''}{why}."
    assert asked == [(7, 7.0)]


def test_a_wait_is_never_shorter_than_nothing(monkeypatch):
    moments = iter([100.0, 111.0])
    monkeypatch.setattr(results, "time", SimpleNamespace(monotonic=lambda: next(moments)))
    assert next(results._seconds_left(10)) == 0


# Claims: their dates, and their text in the log.


WORKER = uuid4()


def claim_of(**values):
    known = dict.fromkeys(("priority", "retries", "rescues", "run_after", "enqueued_at"), 0)
    known |= dict.fromkeys(("started_at", "last_attempted_at"), 0) | {"max_retries": 2, "id": 7, "worker": WORKER}
    known |= {"backend": "default", "queue": "mail", "task_path": "shop.send", "args": "", "kwargs": "", "meta": ""}
    return Claim(**{**known, **values})


@given(microseconds=st.integers(0, 8 * 10**15))
def test_no_microsecond_is_lost_in_seconds(microseconds):
    date = datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(microseconds=microseconds)
    assert date_of(float(f"{microseconds // 10**6}.{microseconds % 10**6:06}")) == date


@pytest.mark.parametrize(
    ("counts", "text"),
    [
        ({"attempt": 1}, "attempt 1 of 3"),
        ({"attempt": 3, "retries": 2}, "attempt 3 of 3"),
        ({"attempt": 2, "retries": 0, "rescues": 1}, "attempt 2 of 4"),
        ({"attempt": 4, "retries": 2, "rescues": 1}, "attempt 4 of 4"),
        ({"attempt": 9, "retries": 0, "uncounted": 8}, "attempt 1 of 3"),
    ],
    ids=["the first", "the last", "after a rescue", "the last after a rescue", "after snoozes"],
)
def test_the_log_says_which_attempt_it_is_of_how_many(counts, text):
    claim = claim_of(**counts)
    assert str(claim) == f"Task 7 (shop.send) {text}"
    assert claim.is_first is text.startswith("attempt 1 of")
    assert repr(claim) == f"<Claim of task 7 (shop.send) {text.partition(' of')[0]}>"


def test_a_claim_equals_only_itself_and_has_no_other_attributes():
    claim, same = claim_of(attempt=1), claim_of(attempt=1)
    assert len({claim, same}) == 2
    assert claim.is_cancelled is False
    with pytest.raises(AttributeError):
        claim.is_canceled = True


def test_the_fields_of_log_records_are_those_of_the_task():
    fields = claim_of(attempt=9, uncounted=8).log_fields()
    assert tuple(fields) == LOG_FIELDS
    assert list(fields.values()) == [7, "shop.send", "mail", 1, str(WORKER)]


@pytest.mark.parametrize(
    ("run_after", "last_attempted_at", "due_at", "waited"),
    [(None, "15.5", 10, 5.5), ("12", "15.5", 12, 3.5), ("8", "15.5", 10, 5.5), ("20", "15.5", 20, 0)],
)
def test_a_task_is_due_when_it_is_enqueued_and_its_date_is_over(run_after, last_attempted_at, due_at, waited):
    """If the clock is set back in between, the wait is zero and not negative."""
    claim = claim_of(attempt=1, enqueued_at="10", run_after=run_after, last_attempted_at=last_attempted_at)
    assert (claim.due_at, claim.waited) == (due_at, waited)


def test_the_dates_are_values_and_a_first_attempt_starts_now(settings):
    claim = claim_of(attempt=1, run_after=None, started_at=None, last_attempted_at="15.5", enqueued_at="10")
    started = datetime(1970, 1, 1, 0, 0, 15, 500_000, tzinfo=timezone.utc)
    assert (claim.date("started_at"), claim.date("last_attempted_at")) == (started, started)
    assert claim.date("run_after") is None
    assert claim_of(attempt=2, started_at="9", last_attempted_at="15").date("started_at").second == 9
    settings.USE_TZ, settings.TIME_ZONE = False, "UTC"
    assert claim.date("started_at") == started.replace(tzinfo=None)


# The table of states and moves.


def test_the_table_of_moves_has_every_status():
    """A status that is missing in the table could never be left."""
    assert set(MOVES) == set(TaskStatus)


def test_only_a_person_moves_a_task_that_is_finished():
    """By a retry or, if it has failed, by a discard. No worker may touch the row again."""
    for status in FINISHED - {TaskStatus.FAILED}:
        assert MOVES[status] <= {TaskStatus.READY, TaskStatus.BLOCKED}
    assert MOVES[TaskStatus.FAILED] == {TaskStatus.READY, TaskStatus.BLOCKED, TaskStatus.CANCELLED}
    assert MOVES[TaskStatus.SUCCESSFUL] == frozenset()


def test_only_ready_tasks_can_be_claimed():
    assert {source for source, targets in MOVES.items() if TaskStatus.RUNNING in targets} == WAITING


def test_every_status_can_be_reached_and_all_families_are_disjoint():
    reachable = {target for targets in MOVES.values() for target in targets}
    assert reachable | WAITING == set(TaskStatus)
    assert not FINISHED & WAITING
    assert FINISHED | WAITING | {TaskStatus.RUNNING} == set(TaskStatus)


# The classes of ``django.tasks`` are those of one package: Django's own, or the backport on Django 5.2.


@pytest.mark.parametrize("name", [name for name in compat.__all__ if isinstance(getattr(compat, name), type)])
def test_each_class_is_of_the_package_that_the_version_of_django_decides_on(name):
    """Both may be installed. An object of the other one would fail each isinstance."""
    package = "django.tasks" if django.VERSION >= (6, 0) else "django_tasks"
    assert getattr(compat, name).__module__.startswith(package)


def test_the_signals_are_those_that_receivers_of_a_project_connect_to():
    expected = import_module("django.tasks.signals" if django.VERSION >= (6, 0) else "django_tasks.signals")
    for name in ("task_enqueued", "task_started", "task_finished"):
        assert isinstance(getattr(compat, name), Signal)
        assert getattr(compat, name) is getattr(expected, name)
