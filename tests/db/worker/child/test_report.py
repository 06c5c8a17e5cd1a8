"""What the log says of each task, and what receivers of ``task_finished`` find.

docs/admin.md has the rule: one line for each claim that ends.
"""

from __future__ import annotations

import logging
import re
import sys
import traceback

import pytest

from django_pglock.errors import TaskCancelled
from django_pglock.models import Task
from django_pglock.store.outcome import GivenBack
from django_pglock.tasks.compat import BaseTaskBackend, task_finished
from django_pglock.worker.child.in_flight import EndedClaim
from django_pglock.worker.child.logs import report, report_lost
from tests.sample import result_tasks as sample
from tests.sample import running_tasks, tasks

pytestmark = pytest.mark.django_db(transaction=True)

DJANGOS = BaseTaskBackend.__module__.partition(".backends")[0]


@pytest.fixture
def ended(worker, eventually):
    """Run a task to its end, and return it when its worker has logged everything."""
    running = worker(threads=1)

    def wait(result, status):
        eventually(lambda: Task.objects.filter(pk=result.id, status=status).exists())
        eventually(lambda: not running.in_flight.claims)
        return result

    return wait


@pytest.fixture
def lines(caplog):
    """The lines about a task, each with its level."""
    caplog.set_level(logging.DEBUG, logger="django_pglock.worker")

    def of(result):
        records = [each for each in caplog.records if getattr(each, "task_id", None) == int(result.id)]
        return [(each.levelname, re.sub(r"\d+\.\d{3} s", "T s", each.getMessage())) for each in records]

    return of


def record_of(caplog, result, level=logging.ERROR):
    [found] = [each for each in caplog.records if each.levelno == level and hasattr(each, "task_id")]
    assert found.task_id == int(result.id)
    return found


def test_a_success_is_one_line_at_debug(ended, lines):
    result = ended(tasks.echo.enqueue(5), "SUCCESSFUL")
    assert lines(result) == [
        ("DEBUG", f"Task {result.id} (tests.sample.tasks.echo) attempt 1 of 1 succeeded after T s.")
    ]


def test_a_success_makes_no_log_record_if_debug_is_disabled(ended, caplog):
    result = ended(tasks.echo.enqueue(5), "SUCCESSFUL")
    assert not [each for each in caplog.records if getattr(each, "task_id", None) == int(result.id)]


def test_a_failure_is_one_line_at_error_with_message_and_traceback(ended, lines, caplog):
    result = ended(sample.fail_deep.enqueue(7), "FAILED")
    path = "tests.sample.result_tasks.fail_deep"
    text = f"Task {result.id} ({path}) attempt 1 of 1 failed after T s: LookupError: there is no order 7."
    assert lines(result) == [("ERROR", text)]
    record = record_of(caplog, result)
    kind, error, trace = record.exc_info
    assert (kind, str(error)) == (LookupError, "there is no order 7")
    assert [each.name for each in traceback.extract_tb(trace)] == ["fail_deep", "look_up"], "so it groups by function"
    assert (record.task_path, record.queue, record.attempt) == (path, "default", 1)
    assert record.worker == str(Task.objects.get(pk=result.id).worker)


def test_each_attempt_that_fails_has_its_line(ended, lines):
    result = ended(sample.fail_twice.enqueue(7), "FAILED")
    (first, retried), (second, failed) = lines(result)
    assert (first, second) == ("WARNING", "ERROR")
    assert re.search(r"attempt 1 of 2 failed after T s and will run again in \d+\.\d s: LookupError: there is", retried)
    assert re.search(r"attempt 2 of 2 failed after T s: LookupError: there is no order 7\.$", failed)


def test_snooze_and_cancel_have_one_log_line_each(ended, lines):
    snoozed = ended(tasks.say.enqueue("snooze"), "SUCCESSFUL")
    assert [level for level, _ in lines(snoozed)] == ["INFO", "DEBUG"]
    assert "asked after T s to be run again in" in lines(snoozed)[0][1]
    cancelled = ended(tasks.say.enqueue("cancel"), "CANCELLED")
    [(level, text)] = lines(cancelled)
    assert (level, "was cancelled after T s: Cancel: " in text) == ("INFO", True)


def test_a_claim_that_is_given_back_or_lost_has_one_log_line(claim, caplog):
    caplog.set_level(logging.DEBUG, logger="django_pglock.worker")
    tasks.nothing.enqueue()
    [given] = claim()
    report(EndedClaim(given, GivenBack()))
    report_lost(EndedClaim(given, None))
    assert [each.getMessage().partition("attempt 1 of 1 ")[2] for each in caplog.records] == [
        "was given back.",
        "was lost: the task no longer belongs to this worker, so this outcome was dropped.",
    ]


# Receivers


@pytest.fixture
def received():
    """Record, for each ``task_finished``, the status of the result and the exception that is being handled."""
    found = []

    def receive(sender, task_result, **kwargs):
        found.append((str(task_result.status), sys.exc_info()[1]))

    task_finished.connect(receive)
    yield found
    task_finished.disconnect(receive)


@pytest.mark.parametrize("function", [sample.fail_deep, sample.fail_in_coroutine], ids=lambda each: each.name)
def test_task_finished_of_a_failure_is_sent_while_its_exception_is_handled(
    ended, received, eventually, caplog, function
):
    """Django's log of tasks uses the exception that is being handled for its traceback."""
    ended(function.enqueue(7), "FAILED")
    [(status, error)] = received
    assert (status, type(error), str(error)) == ("FAILED", LookupError, "there is no order 7")
    [record] = [each for each in caplog.records if each.name == DJANGOS and each.levelno == logging.ERROR]
    assert record.exc_info[1] is error
    frames = [each.name for each in traceback.extract_tb(record.exc_info[2])]
    if sys.version_info < (3, 11):
        # Until 3.10 a handler has the traceback of the moment at which it began.
        assert frames.pop(0) == "_send_failure"
    assert frames == [function.name, "look_up"]


def test_task_finished_of_a_success_is_sent_while_no_exception_is_handled(ended, received):
    ended(tasks.echo.enqueue(5), "SUCCESSFUL")
    assert received == [("SUCCESSFUL", None)]


def test_task_finished_of_a_cancelled_running_task_has_task_cancelled_as_error(ended, received, eventually):
    result = running_tasks.ask.enqueue()
    eventually(lambda: Task.objects.filter(pk=result.id, status="RUNNING").exists())
    assert Task.objects.filter(pk=result.id).cancel() == 1
    ended(result, "CANCELLED")
    assert [(status, type(error)) for status, error in received] == [("FAILED", TaskCancelled)]


# Objects that the exception refers to
