"""``capture_logs``: what an attempt logs is stored with its outcome."""

from __future__ import annotations

import logging

import pytest
from asgiref.sync import sync_to_async

from django_pglock import Snooze, task
from django_pglock.errors import TaskOptionError
from django_pglock.models import Attempt, Task
from django_pglock.worker.child import attempt
from django_pglock.worker.child.attempt import CapturedLogs
from tests.sample.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)
logger = logging.getLogger("tests.captured")
child = logging.getLogger("tests.captured.child")


@pytest.fixture(autouse=True)
def levels():
    logger.setLevel(logging.DEBUG)
    yield
    logger.setLevel(logging.NOTSET)


def say(name):
    logger.debug("detail of %s", name)
    child.info("charged %s", name)


@task(capture_logs=True)
def succeed(name):
    say(name)


@task(capture_logs="INFO")
def succeed_from_info_on(name):
    say(name)


@task(capture_logs=True, atomic=True)
def succeed_atomically(name):
    say(name)


@task(capture_logs=True, max_attempts=2, backoff=0)
def fail(name):
    say(name)
    raise ValueError("refused")


@task(capture_logs=True, atomic=True)
def fail_atomically(name):
    Effect.objects.create(name=name)
    say(name)
    raise ValueError("refused")


@task(capture_logs=True)
async def succeed_in_coroutine(name):
    say(name)
    await sync_to_async(child.warning)("in the thread of the ORM")


@task(capture_logs=True, group="{name}")
def together(calls):
    say(f"{len(calls)} calls")


@task
def silent(name):
    say(name)


@task(capture_logs=True)
def nothing():
    pass


@task(capture_logs=True)
def snooze():
    say("snooze")
    raise Snooze(3600)


@task(capture_logs=True, max_attempts=2, backoff=0)
def fail_once_then_say_nothing():
    if not Effect.objects.exists():
        Effect.objects.create(name="failed")
        say("first")
        raise ValueError("refused")


class Unprintable:
    def __str__(self):
        raise RuntimeError("no text")


def lines_of(text):
    """Return the lines of a log without their dates."""
    return [line.partition("Z ")[2] or line for line in (text or "").splitlines()]


def both(name):
    return [f"DEBUG tests.captured: detail of {name}", f"INFO tests.captured.child: charged {name}"]


@pytest.fixture
def run_to_end(worker, eventually):
    """Run tasks to their end; return their rows."""

    def run(*results):
        ids = [int(each.id) for each in results]
        worker(threads=1)
        eventually(lambda: Task.objects.filter(pk__in=ids, finished_at__isnull=False).count() == len(ids))
        return [Task.objects.get(pk=each) for each in ids]

    return run


def test_the_log_of_each_kind_of_success_is_in_the_row_of_its_task(run_to_end, eventually):
    grouped = [together.enqueue(name="g"), together.enqueue(name="g")]
    rows = run_to_end(
        *(each.enqueue(name) for name, each in enumerate((succeed, succeed_atomically, succeed_in_coroutine))),
        *(succeed_from_info_on.enqueue("i"), silent.enqueue("s"), nothing.enqueue(), *grouped),
    )
    # The log of an atomic task is written after its own transaction.
    eventually(lambda: Task.objects.get(pk=rows[1].pk).log)
    rows[1].refresh_from_db()
    plain, atomic, coroutine, from_info_on, _, _, one, two = (lines_of(each.log) for each in rows)
    assert (plain, atomic) == (both(0), both(1))
    assert coroutine == [*both(2), "WARNING tests.captured.child: in the thread of the ORM"]
    assert from_info_on == both("i")[1:]
    assert (rows[4].log, rows[5].log) == (None, None)
    assert one == two == both("2 calls")
    assert {each.status for each in rows} == {"SUCCESSFUL"}


def test_the_log_of_a_failed_attempt_is_in_its_row(run_to_end):
    failed, rolled_back = run_to_end(fail.enqueue("a"), fail_atomically.enqueue("b"))
    assert [lines_of(each.log) for each in (failed, rolled_back)] == [both("a"), both("b")]
    attempts = Attempt.objects.filter(task=failed).order_by("number")
    assert [lines_of(each.log) for each in attempts] == [both("a")] * 2
    assert not Effect.objects.exists()


def test_a_success_that_logs_nothing_does_not_show_the_log_of_the_failure_before(run_to_end):
    [row] = run_to_end(fail_once_then_say_nothing.enqueue())
    assert (row.status, row.log) == ("SUCCESSFUL", None)
    assert lines_of(Attempt.objects.get().log) == both("first")


def test_a_snooze_keeps_its_log_until_the_next_attempt(worker, eventually):
    made = snooze.enqueue()
    worker(threads=1)
    row = eventually(lambda: Task.objects.filter(pk=made.id, status="SCHEDULED").first())
    assert lines_of(row.log) == both("snooze")


def record(text, *args):
    return logging.LogRecord("name", logging.INFO, "", 0, text, args, None)


def test_a_record_that_cannot_be_formatted_or_stored_raises_nothing():
    logs = CapturedLogs(0)
    for each in (record("value: %s", Unprintable()), record("wrong: %d", "number"), record("nul \x00 and \ud800")):
        logs.add(each)
    assert lines_of(logs.text()) == [
        "INFO name: the record cannot be formatted (RuntimeError)",
        "INFO name: the record cannot be formatted (TypeError)",
        r"INFO name: nul \x00 and \ud800",
    ]


def test_only_the_last_records_are_kept_and_few_characters():
    logs = CapturedLogs(0)
    assert logs.text() is None
    for number in range(attempt.MOST_RECORDS + 5):
        logs.add(record(f"number {number}"))
    first, *_, last = lines_of(logs.text())
    assert (first, last) == ("INFO name: number 5", f"INFO name: number {attempt.MOST_RECORDS + 4}")
    for _ in range(20):
        logs.add(record("x" * 10_000))
    lines = logs.text().splitlines()
    assert logs.text().startswith("…")
    assert sum(map(len, lines)) <= attempt.MOST_CHARACTERS + 100
    assert {len(line) for line in lines[1:]} == {attempt.LONGEST_RECORD + 1}


@pytest.mark.parametrize("value", ["LOUD", -1, 1.5, [], b"INFO"])
def test_a_level_that_does_not_exist_is_refused(value, own_registry):
    with pytest.raises(TaskOptionError, match="capture_logs is"):
        task(capture_logs=value)(say)
