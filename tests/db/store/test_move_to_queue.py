"""Moving waiting tasks to another queue."""

from __future__ import annotations

import pytest

from django_pglock.models import Task
from tests.db.admin.visits import make
from tests.sample import tasks

pytestmark = pytest.mark.django_db


def test_tasks_that_are_already_in_the_queue_are_not_counted():
    make(queue="other")
    assert [Task.objects.all().move_to_queue(queue) for queue in ("other", "third")] == [0, 1]


@pytest.mark.parametrize("queue", ["", "x" * 129])
def test_a_name_that_no_queue_can_have_is_refused(queue):
    row = make()
    with pytest.raises(ValueError, match="queue"):
        Task.objects.all().move_to_queue(queue)
    row.refresh_from_db()
    assert row.queue == "default"


def test_a_queue_that_the_settings_do_not_list_is_refused(settings):
    name = "django_pglock.backend.PostgresBackend"
    settings.TASKS = {"default": {"BACKEND": name, "QUEUES": ["default", "other"]}}
    row = make()
    with pytest.raises(ValueError, match="lists the queue 'third'"):
        Task.objects.all().move_to_queue("third")
    assert Task.objects.filter(pk=row.pk).move_to_queue("other") == 1


def test_backends_of_another_database_do_not_count(settings):
    name = "django_pglock.backend.PostgresBackend"
    settings.TASKS = {
        "default": {"BACKEND": name, "QUEUES": ["default"]},
        "other": {"BACKEND": name, "QUEUES": ["other"], "OPTIONS": {"database": "replica"}},
    }
    with pytest.raises(ValueError, match="lists the queue 'other'"):
        Task.objects.all().move_to_queue("other")


@pytest.mark.parametrize(("status", "woken"), [("READY", ["other"]), ("SCHEDULED", []), ("BLOCKED", [])])
def test_workers_of_the_queue_are_woken_for_ready_tasks(monkeypatch, status, woken):
    made = []
    monkeypatch.setattr("django_pglock.store.operate.wake", lambda using, queues: made.extend(queues))
    make(status)
    assert Task.objects.all().move_to_queue("other") == 1
    assert made == woken


@pytest.mark.django_db(transaction=True)
def test_a_worker_of_the_queue_runs_the_tasks(worker, eventually):
    result = tasks.nothing.enqueue()
    worker(queues=["other"])
    assert Task.objects.all().move_to_queue("other") == 1
    eventually(lambda: Task.objects.get(pk=result.id).status == "SUCCESSFUL")
