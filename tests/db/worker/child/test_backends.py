"""Several backends of TASKS that share a database, and workers that serve one of them."""

from __future__ import annotations

import pytest
from django.core.management import CommandError, call_command

from django_pglock.errors import ConfigurationError
from django_pglock.models import Task
from django_pglock.worker import Worker
from tests.sample import keyed_tasks, tasks

pytestmark = pytest.mark.django_db(transaction=True)

OURS = "django_pglock.backend.PostgresBackend"


@pytest.fixture(autouse=True)
def backends(settings):
    ours = {"BACKEND": OURS, "QUEUES": []}
    settings.TASKS = {
        "default": ours,
        "reports": {**ours, "QUEUES": ["default", "nightly"]},
        "elsewhere": {**ours, "OPTIONS": {"database": "other"}},
    }


def finished():
    return set(Task.objects.filter(status="SUCCESSFUL").values_list("backend", flat=True))


@pytest.mark.parametrize(
    ("function", "key"),
    [(tasks.nothing, None), (keyed_tasks.step, "order_id"), (keyed_tasks.serve, "tenant")],
)
def test_a_worker_serves_only_the_backend_of_its_option(worker, eventually, function, key):
    names = ("default", "reports")
    theirs, ours = [function.using(backend=name).enqueue(**({key: name} if key else {})) for name in names]
    running = worker(backend="reports")
    eventually(lambda: finished() == {"reports"}, why="its own task does not run")
    eventually(lambda: running.feeder.asks)
    assert Task.objects.get(pk=theirs.id).status == "READY"
    worker(using="default")
    eventually(lambda: finished() == {"reports", "default"}, why="a worker without a backend serves all")
    assert Task.objects.get(pk=ours.id).attempts == 1


def test_a_group_is_of_one_backend(worker, eventually):
    for name in ("reports", "default", "reports"):
        keyed_tasks.digest.using(backend=name).enqueue(user=1, text=name)
    worker(backend="reports")
    eventually(lambda: finished() == {"reports"})
    assert set(Task.objects.filter(backend="reports").values_list("result", flat=True)) == {2}
    assert not Task.objects.filter(backend="default", attempts__gt=0).exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["--backend", "report"],
            "TASKS has no backend 'report' of django_pglock. Its backends: default, elsewhere, reports",
        ),
        (
            ["--backend", "elsewhere", "--database", "default"],
            "Backend 'elsewhere' stores its tasks in database 'other'",
        ),
        (["--backend", "reports", "mail"], "QUEUES has no 'mail'; it has default, nightly"),
    ],
)
def test_an_invalid_backend_is_refused(arguments, text):
    with pytest.raises(CommandError, match=text):
        call_command("runlockworker", *arguments)


def test_a_worker_for_a_backend_of_another_database_is_refused():
    with pytest.raises(ConfigurationError, match="Backend 'elsewhere' stores its tasks in database 'other'"):
        Worker(using="default", backend="elsewhere")


def test_the_command_finds_the_database_by_the_backend(worker_process, eventually):
    theirs, ours = [tasks.nothing.using(backend=name).enqueue() for name in ("default", "reports")]
    worker_process("--backend", "reports", DJANGO_SETTINGS_MODULE="tests.settings_two_backends")
    eventually(lambda: finished() == {"reports"})
    assert Task.objects.get(pk=theirs.id).status == "READY"
    assert Task.objects.get(pk=ours.id).status == "SUCCESSFUL"
