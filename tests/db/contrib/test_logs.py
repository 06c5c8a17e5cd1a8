"""The log filter: records that are made while a task runs have its fields."""

from __future__ import annotations

import asyncio
import logging
from logging.config import DictConfigurator

import pytest

from django_pglock.contrib.logs import TaskFilter
from django_pglock.tasks.claim import LOG_FIELDS
from django_pglock.worker.child.run import prepare, run, run_async
from django_pglock.worker.child.runners import Runner, Watchdog
from tests.sample import tasks

pytestmark = pytest.mark.django_db(transaction=True)


class Instead:
    """A definition with another function."""

    def __init__(self, definition, func):
        self.definition, self.func = definition, func

    def __getattr__(self, name):
        return getattr(self.definition, name)


def attempt_of(claim, call):
    """Return an attempt that calls this instead of its function."""
    attempt = prepare(claim, "default")
    attempt.definition = Instead(attempt.definition, lambda *args: call())
    return attempt


def fields_of(task_filter=None, **extra):
    """Make a log record and return its fields."""
    record = logging.makeLogRecord({"msg": "charged", **extra})
    assert (task_filter or TaskFilter()).filter(record)
    return {name: getattr(record, name) for name in LOG_FIELDS}


def test_a_record_of_a_running_function_has_its_task(claim):
    result = tasks.nothing.using(queue_name="default").enqueue()
    [claimed] = claim()
    inside = []
    run(attempt_of(claimed, lambda: inside.append(fields_of())), Runner(Watchdog()))
    assert inside == [claimed.log_fields()]
    assert inside[0] == {
        "task_id": int(result.id),
        "task_path": tasks.nothing.module_path,
        "queue": "default",
        "attempt": 1,
        "worker": str(claimed.worker),
    }
    assert fields_of() == dict.fromkeys(LOG_FIELDS), "it has ended"


def test_coroutines_that_run_at_once_have_their_own_tasks(claim):
    for _ in range(2):
        tasks.sleep_async.enqueue(0)
    claims = claim(2)
    begun = []

    async def call():
        begun.append(1)
        while len(begun) < 2:
            await asyncio.sleep(0)
        return fields_of()["task_id"]

    async def run_all():
        return await asyncio.gather(*(run_async(attempt_of(each, call), Runner(Watchdog())) for each in claims))

    ended = asyncio.run(run_all())
    assert [each.outcome.result for each in ended] == [str(each.id) for each in claims]


def test_a_record_about_a_task_keeps_its_fields(claim):
    tasks.nothing.enqueue()
    seen = []
    run(attempt_of(claim()[0], lambda: seen.append(fields_of(task_id=7))), Runner(Watchdog()))
    assert seen[0]["task_id"] == 7


def test_a_logging_configuration_can_name_it():
    configurator = DictConfigurator({"version": 1})
    made = configurator.configure_filter({"()": "django_pglock.contrib.logs.TaskFilter"})
    assert fields_of(made) == dict.fromkeys(LOG_FIELDS)


def test_a_formatter_with_task_fields_formats_records_outside_a_task():
    record = logging.makeLogRecord({"msg": "started"})
    TaskFilter().filter(record)
    assert logging.Formatter("%(message)s %(task_id)s").format(record) == "started None"
