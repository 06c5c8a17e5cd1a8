"""Task functions in modules that are not imported: a worker finds them inside of installed apps only."""

from __future__ import annotations

import logging
import sys
from uuid import uuid4

import pytest
from django.core import mail
from django.utils.module_loading import import_string

from django_pglock.models import Task
from django_pglock.store.wake import wake
from django_pglock.tasks import registry
from django_pglock.worker.child.claimer import Claimer
from django_pglock.worker.queues import Queues
from tests.sample import tasks
from tests.sample.models import Effect
from tests.unit.tasks.test_registry import NEVER, PATH
from tests.unit.tasks.test_registry import modules_are_not_imported as modules_are_not_imported  # a fixture

pytestmark = pytest.mark.django_db(transaction=True)


def enqueue_unknown(path=PATH, **fields):
    values = {"queue": "default", "backend": "default", "task_path": path, "args": ["a letter"], **fields}
    return Task.objects.create(**values)


def succeeded(*rows):
    return lambda: Task.objects.filter(pk__in=[row.pk for row in rows], status="SUCCESSFUL").count() == len(rows)


def test_a_worker_imports_the_module_of_a_task_enqueued_before_its_start(worker, eventually, caplog):
    caplog.set_level(logging.INFO, logger="django_pglock.tasks")
    row = enqueue_unknown()
    worker()
    eventually(succeeded(row))
    assert Effect.objects.get().name == "delivered a letter"
    assert caplog.messages.count("Imported tests.sample.mail, the module of a task.") == 1


def test_a_sleeping_worker_imports_the_module_of_a_task_after_its_notification(worker, eventually, settings):
    """The next poll of the worker would come ten minutes later."""
    settings.DJANGO_PGLOCK = {**settings.DJANGO_PGLOCK, "POLL_INTERVAL": 600.0}
    asleep = worker()
    eventually(lambda: asleep.feeder.asks)
    first = tasks.nothing.enqueue()
    eventually(lambda: Task.objects.filter(pk=first.id, status="SUCCESSFUL").exists())
    backend = import_string("tests.sample.mail.TaskBackend")()
    backend.send_messages([mail.EmailMessage("a letter", "Dear reader", "a@example.com", ["b@example.com"])])
    eventually(succeeded(Task.objects.get(task_path=PATH)))
    # A poll that has begun may still claim tasks of this function. Now the worker has polled for the last time.
    eventually(lambda: asleep.feeder._is_rest_empty)
    # In a web process, the module is imported; here the worker shares the process, so it is forgotten again.
    del sys.modules["tests.sample.mail"], registry._definitions[PATH]
    second = enqueue_unknown()
    wake("default", ["default"])
    eventually(succeeded(second))


def test_a_draining_worker_runs_tasks_of_modules_that_it_must_import(worker):
    rows = [enqueue_unknown(), enqueue_unknown(status="SCHEDULED", run_after="2020-01-01T00:00Z")]
    running = worker(drain=True)
    assert running.wait()
    running.shutdown()
    assert succeeded(*rows)()


def test_a_worker_imports_only_modules_of_task_functions(worker, eventually, caplog):
    rows = [enqueue_unknown(path) for path in NEVER]
    known = enqueue_unknown()
    modules = set(sys.modules)
    worker()
    eventually(succeeded(known))
    for _ in range(3):
        more = tasks.nothing.enqueue()
        eventually(lambda id_=more.id: Task.objects.filter(pk=id_, status="SUCCESSFUL").exists())
    assert {*Task.objects.filter(pk__in=[row.pk for row in rows]).values_list("status", "attempts")} == {("READY", 0)}
    assert {each for each in set(sys.modules) - modules if each.startswith("tests")} == {"tests.sample.mail"}
    assert not Effect.objects.filter(name__startswith="ran").exists()
    # Once, and only for the one that is there and fails.
    assert [each.getMessage() for each in caplog.records if "cannot be imported" in each.getMessage()] == [
        "The module tests.sample.broken of a task cannot be imported."
    ]


def test_functions_are_imported_only_for_served_queues():
    enqueue_unknown(queue="mail")
    assert Claimer("default", uuid4(), Queues(["other"])).search() is False
    assert "tests.sample.mail" not in sys.modules
    assert Claimer("default", uuid4(), Queues(["ma*"])).search() is True
    assert registry.find(PATH) is not None
