"""django-maintenance-tasks and django-crontask: they enqueue through ``django.tasks`` and know no backend.

The first one runs a backfill in tasks that enqueue themselves anew, and waits between two of them by ``run_after``
where the backend says ``supports_defer``. The second one has a scheduler that calls ``enqueue``; with Sentry's SDK
installed it makes the task anew, by the class of the task and Django's own six fields.
"""

from __future__ import annotations

from contextlib import suppress

import pytest
from crontask import scheduler
from django.core import mail
from django.db import transaction
from django.tasks import default_task_backend
from django.test import override_settings
from maintenance_tasks import runner
from maintenance_tasks.models import Run
from maintenance_tasks.task import all_tasks

from django_pglock.backend import PostgresBackend
from django_pglock.models import Task
from qa.foreign.process import drain_elsewhere
from qa.foreign.sample.models import Letter
from qa.foreign.upkeep.maintenance_tasks import Capitalise
from qa.foreign.upkeep.tasks import write_nightly


@pytest.fixture(autouse=True)
def letters():
    Run.objects.all().delete()
    Letter.objects.all().delete()
    Letter.objects.bulk_create(Letter(text=f"letter {number}") for number in range(5))


def test_the_backend_says_what_it_can():
    # Django's proxy has no attributes of a class.
    assert isinstance(default_task_backend._connections[default_task_backend._alias], PostgresBackend)
    assert default_task_backend.supports_defer
    assert default_task_backend.supports_get_result
    assert Capitalise in all_tasks()


def test_a_backfill_runs_to_its_end_in_several_tasks(drain):
    run = runner.start(Capitalise.name)
    drain()
    run.refresh_from_db()
    assert run.status == Run.Status.SUCCEEDED
    assert run.tick_count == 5
    assert all(text.startswith("LETTER") for text in Letter.objects.values_list("text", flat=True))
    assert Task.objects.count() > 1
    assert {*Task.objects.values_list("status", flat=True)} == {"SUCCESSFUL"}


def test_a_worker_that_has_imported_nothing_runs_a_backfill():
    """Its task function is in ``maintenance_tasks.runner``, which Django does not import at its start."""
    run = runner.start(Capitalise.name)
    said = drain_elsewhere()
    assert "Imported maintenance_tasks.runner, the module of a task." in said
    run.refresh_from_db()
    assert run.status == Run.Status.SUCCEEDED
    assert all(text.startswith("LETTER") for text in Letter.objects.values_list("text", flat=True))


@override_settings(EMAIL_BACKEND="qa.foreign.upkeep.mail.TaskBackend")
def test_a_worker_that_has_imported_nothing_runs_a_mail_backends_tasks():
    mail.send_mail("spring", "Dear reader", "a@example.com", ["b@example.com"])
    assert Task.objects.get().task_path == "qa.foreign.upkeep.mail.deliver"
    drain_elsewhere()
    assert Letter.objects.filter(text="delivered: spring").exists()


def test_a_backfill_that_is_rolled_back_is_never_enqueued(drain):
    with suppress(ZeroDivisionError), transaction.atomic():
        runner.start(Capitalise.name)
        raise ZeroDivisionError
    drain()
    assert Task.objects.count() == Run.objects.count() == 0


def test_a_backfill_that_pauses_waits_by_run_after(drain, monkeypatch):
    monkeypatch.setattr(Capitalise, "throttle", lambda self: True)
    runner.start(Capitalise.name)
    drain()
    later = Task.objects.get(status="SCHEDULED")
    assert later.run_after > later.enqueued_at


def test_the_clock_enqueues(drain):
    [job] = [job for job in scheduler.get_jobs() if job.name == write_nightly.name]
    job.func()
    job.func()
    assert Task.objects.filter(task_path="qa.foreign.upkeep.tasks.write_nightly").count() == 2
    drain()
    assert Letter.objects.filter(text="nightly").count() == 2
    result = write_nightly.enqueue()
    assert write_nightly.get_result(result.id).status == "READY"
