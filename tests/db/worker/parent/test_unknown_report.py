"""Tasks that no worker knows: not changed, reported once, and run when a worker starts that knows them."""

from __future__ import annotations

from uuid import uuid4

import pytest

from django_pglock import task
from django_pglock.models import Queue, Task
from django_pglock.store.claim import claim_statement
from django_pglock.tasks import registry
from django_pglock.worker.parent import upkeep as unknown
from tests.db.store.workers import beat
from tests.db.worker.conftest import make_upkeep, run_to_its_end
from tests.sample import tasks
from tests.sample.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)

PATH = "tests.db.worker.parent.test_unknown_report.from_the_next_deploy"


def from_the_next_deploy(name):
    Effect.objects.create(name=name)


@pytest.fixture
def deploy(monkeypatch):
    """Let this process know a function that it did not know, for the time of the test."""
    monkeypatch.setattr(registry, "_definitions", dict(registry._definitions))
    return lambda: task(from_the_next_deploy)


@pytest.fixture
def always_look(monkeypatch):
    monkeypatch.setattr(unknown, "BETWEEN_WARNINGS", 0.0)


def enqueue_unknown(count=1, path=PATH, **fields):
    values = {"queue": "default", "backend": "default", "task_path": path, "args": ["ran"], **fields}
    return [Task.objects.create(**values) for _ in range(count)]


def beat_of(*paths):
    """A worker sends a heartbeat; its id."""
    worker = uuid4()
    known = {"task_paths": list(paths)}
    beat("default", worker, name="w", hostname="h", pid=1, queues=[], threads=1, is_stopping=False, **known)
    return worker


def warnings(caplog):
    return [each.getMessage() for each in caplog.records if "no running worker has imported" in each.getMessage()]


def test_an_unknown_task_is_reported_once_and_run_by_a_worker_that_knows_it(
    worker, deploy, always_look, eventually, caplog, monkeypatch
):
    looks = []
    look = unknown.unknown
    monkeypatch.setattr(unknown, "unknown", lambda using: looks.append(using) or look(using))
    rows = enqueue_unknown(2)
    old = worker()
    known = tasks.nothing.enqueue()
    eventually(lambda: Task.objects.filter(pk=known.id, status="SUCCESSFUL").exists())
    seen = len(looks)
    eventually(lambda: len(looks) >= seen + 3)
    assert set(Task.objects.filter(task_path=PATH).values_list("status", "attempts")) == {("READY", 0)}
    [warning] = warnings(caplog)
    assert warning.startswith(f"2 tasks of queue 'default' call {PATH!r}, which no running worker has imported. ")
    assert warning.endswith("Import its module in the workers, or deploy the version that defines it.")
    old.shutdown()
    deploy()
    worker()
    eventually(lambda: Effect.objects.count() == 2)
    eventually(lambda: Task.objects.filter(pk__in=[row.pk for row in rows], status="SUCCESSFUL").count() == 2)
    assert Task.objects.unknown() == []
    assert len(warnings(caplog)) == 1


def test_an_unknown_function_is_reported_again_when_its_tasks_return(always_look, caplog):
    beat_of("shop.known")
    upkeep = make_upkeep()
    rows = enqueue_unknown()
    enqueue_unknown(2, "shop.other", queue="mail")
    enqueue_unknown(1, "shop.other", queue="post")
    for _ in range(2):
        upkeep._warn()
    assert len(warnings(caplog)) == 2, "one for each function"
    assert warnings(caplog)[0].startswith(f"1 task of queue 'default' calls {PATH!r}, which")
    Task.objects.filter(pk=rows[0].pk).cancel()
    upkeep._warn()
    enqueue_unknown()
    upkeep._warn()
    assert [PATH in each for each in warnings(caplog)] == [True, False, True]


@pytest.mark.parametrize(("older_parents", "count"), [(0, 1), (1, 0)])
def test_only_the_oldest_parent_reports_unknown_functions(always_look, caplog, older_parents, count):
    enqueue_unknown()
    make_upkeep(older_parents=older_parents)._warn()
    assert len(warnings(caplog)) == count


def test_a_worker_that_knows_no_function_claims_nothing_and_drains(monkeypatch):
    """As in a project that has installed the app and has no task function yet."""
    tasks.nothing.enqueue()
    monkeypatch.setattr(registry, "_definitions", {})
    assert claim_statement("default", worker=uuid4(), paths=[]).execute(1, "default") == []
    run_to_its_end(threads=1, drain=True)
    assert Task.objects.get().attempts == 0


def test_tasks_of_a_queue_that_no_worker_serves_are_reported_once(worker, always_look, eventually, caplog):
    """As after a deploy whose workers no longer name the queue. A queue that is paused waits for a person."""
    for queue in ("left", "left", "paused"):
        tasks.nothing.using(queue_name=queue).enqueue()
    Queue.objects.pause("paused")
    worker(queues=["default", "other*"])
    tasks.nothing.enqueue()
    eventually(lambda: "which no running worker serves" in caplog.text)
    tasks.nothing.using(queue_name="others").enqueue()
    eventually(lambda: Task.objects.filter(status="SUCCESSFUL").count() == 2)
    said = [each.getMessage() for each in caplog.records if "no running worker serves" in each.getMessage()]
    assert [text.split("'")[1] for text in said] == ["left"]
    worker(queues=["left"])
    eventually(lambda: Task.objects.filter(status="SUCCESSFUL").count() == 4)
