"""The hand-off with tasks."""

from __future__ import annotations

import os

import pytest
from django.db import transaction

from django_pglock.models import Task
from django_pglock.worker import Worker
from example_project.systems.handoff.models import Sheet
from example_project.systems.handoff.scenario import rows_by_process
from example_project.systems.handoff.tasks import create, update

pytestmark = pytest.mark.django_db(transaction=True)


def test_updates_wait_for_their_create_and_run_together_in_their_order():
    create.enqueue(sheet="plan")
    for line in "abc":
        update.enqueue(sheet="plan", line=line)
    assert list(Task.objects.order_by("id").values_list("status", flat=True)) == ["READY"] + 3 * ["BLOCKED"]
    Worker(threads=4, drain=True).run()
    assert Sheet.objects.get().lines == ["a", "b", "c"]
    assert set(Task.objects.values_list("status", flat=True)) == {"SUCCESSFUL"}


def test_two_clicks_on_create_make_one_task_and_a_later_one_changes_nothing():
    assert create.enqueue(sheet="plan").id == create.enqueue(sheet="plan").id
    update.enqueue(sheet="plan", line="a")
    Worker(threads=1, drain=True).run()
    create.enqueue(sheet="plan")
    update.enqueue(sheet="plan", line="b")
    Worker(threads=1, drain=True).run()
    assert Sheet.objects.get().lines == ["a", "b"]


def test_updates_of_a_missing_sheet_fail_and_block_no_other_task():
    update.enqueue(sheet="nobody", line="a")
    create.enqueue(sheet="plan")
    Worker(threads=1, drain=True).run()
    assert dict(Task.objects.values_list("task_path", "status")) == {
        update.module_path: "FAILED",
        create.module_path: "SUCCESSFUL",
    }


def test_the_database_says_which_worker_has_which_tasks(worker, eventually):
    Sheet.objects.create(name="plan")
    update.enqueue(sheet="plan", line="a")
    with transaction.atomic():
        Sheet.objects.select_for_update().get()
        worker()
        eventually(lambda: rows_by_process("tasks") == [(os.getpid(), [Task.objects.get().pk])])
    eventually(lambda: Task.objects.get().status == "SUCCESSFUL")
    assert rows_by_process("tasks") == []
