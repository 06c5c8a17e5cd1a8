"""django-tasks-monitor and django-overseer: they record each task by the signals of ``django.tasks``.

Both write what a signal brings into columns of their own, and only log an error on the way: what they cannot write is
missing.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

import pytest
from django.db import transaction
from overseer.models import Job, Run
from tasks_monitor.models import TaskRecord
from tasks_monitor.retry import retry

from django_pglock.models import Task
from qa.foreign.sample.models import Letter
from qa.foreign.sample.tasks import fail, write


@pytest.fixture(autouse=True)
def no_records():
    for model in (Run, Job, TaskRecord, Letter):
        model.objects.all().delete()


def test_a_call_for_later_is_recorded_with_its_date():
    result = write.using(run_after=timedelta(hours=1)).enqueue("later")
    due = Task.objects.get(pk=result.id).run_after
    assert Run.objects.get(result_id=result.id).run_after == due
    assert TaskRecord.objects.get(result_id=result.id).run_after == due


def test_the_end_of_each_task_is_recorded_once(drain):
    written, failed = write.enqueue("soon"), fail.enqueue("never")
    with suppress(ZeroDivisionError), transaction.atomic():
        write.enqueue("rolled back")
        raise ZeroDivisionError
    drain()
    Task.objects.filter(status="SCHEDULED").run_now()
    drain()
    expected = {written.id: "SUCCESSFUL", failed.id: "FAILED"}
    assert dict(Run.objects.values_list("result_id", "status")) == expected
    assert dict(TaskRecord.objects.values_list("result_id", "status")) == expected
    record = TaskRecord.objects.get(result_id=failed.id)
    assert (record.exception_class, record.attempts, len(record.worker_ids)) == ("builtins.ValueError", 2, 2)


def test_a_monitor_enqueues_a_task_again(drain):
    write.enqueue("twice")
    drain()
    retry(TaskRecord.objects.get())
    drain()
    assert Letter.objects.filter(text="twice").count() == 2
    assert {*TaskRecord.objects.values_list("status", flat=True)} == {"SUCCESSFUL"}
