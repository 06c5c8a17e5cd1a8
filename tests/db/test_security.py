"""What a row, a name or a value from outside can do: nothing but what it is meant for."""

from __future__ import annotations

import builtins
import io
import json
import os
import sys
from uuid import uuid4

import pytest
from django.core.management import call_command
from django.db import connection
from django.db.models.functions import Now
from django.urls import reverse

from django_pglock.db import dedicated_connection
from django_pglock.models import Attempt, Task
from django_pglock.tasks.claim import Claim
from django_pglock.tasks.compat import InvalidTask, TaskResultDoesNotExist, task_backends, task_finished
from tests.sample import tasks as sample
from tests.sample.models import Effect

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def other_session():
    """Run a statement in a session of its own, which is kept to the end of the test."""
    other = dedicated_connection("default")
    yield lambda sql: other.cursor().execute(sql)
    other.close()


# Only registered functions run


def not_decorated(*args, **kwargs):
    """A function that exists, in a module that is loaded."""
    Effect.objects.create(name="ran")


NOT_TASKS = [
    "os.system",
    "builtins.eval",
    "subprocess.run",
    "tests.db.test_security.not_decorated",
    "tests.sample.tasks.nothing.func",
    "tests.sample.tasks.Effect.objects.all",
    "tests.sample.evil.anything",
    "tests.sample.evil",
    "",
]


@pytest.fixture
def nothing_runs(monkeypatch, tmp_path):
    """Hear of whatever runs or is imported that must not be."""
    proof = tmp_path / "proof"
    for module, name in ((os, "system"), (builtins, "eval")):
        monkeypatch.setattr(module, name, lambda *args, **kwargs: proof.write_text("ran"))
    modules = set(sys.modules)
    yield f"touch {proof}"
    assert "tests.sample.evil" not in sys.modules
    assert not {each for each in set(sys.modules) - modules if each.startswith(("tests.sample", "this"))}
    assert not proof.exists()
    assert not Effect.objects.filter(name="ran").exists()


def write_row(path, argument="x", **fields):
    """A row as anybody with the right to write the table can make it."""
    columns = {"status": "READY", "queue": "default", "backend": "default", "task_path": path, **fields}
    columns["args"] = json.dumps([argument])
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO django_pglock_task ({', '.join(columns)}) VALUES ({', '.join(['%s'] * len(columns))}) "
            "RETURNING id",
            list(columns.values()),
        )
        return cursor.fetchone()[0]


def test_a_worker_runs_and_imports_nothing_that_a_row_names(worker, eventually, nothing_runs):
    ids = [write_row(path, nothing_runs) for path in NOT_TASKS]
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO django_pglock_schedule (task_path, expression, timezone, next_at) "
            "SELECT unnest(%s::text[]), '* * * * *', 'UTC', now() - interval '1 minute'",
            [NOT_TASKS],
        )
    worker()
    for number in range(20):
        known = sample.nothing.enqueue(number)
        eventually(lambda id_=known.id: Task.objects.filter(pk=id_, status="SUCCESSFUL").exists())
    assert set(Task.objects.filter(pk__in=ids).values_list("status", "attempts")) == {("READY", 0)}
    assert Task.objects.count() == len(ids) + 20, "no schedule of theirs was kept"


def test_a_claim_on_what_is_no_task_fails_and_imports_nothing(nothing_runs):
    """Also if a worker came to have such a claim, by whatever way."""
    from django_pglock.worker.execution import prepare

    for path in NOT_TASKS:
        text = json.dumps([nothing_runs])
        claim = Claim(1, 1, uuid4(), "default", "default", 0, path, text, "{}", "{}", 0, 0, 0, None, "", "", "")
        ending = prepare(claim, "default")
        assert ending.outcome.status == "FAILED"
        assert "is not registered" in ending.outcome.failure.traceback


@pytest.mark.parametrize("path", NOT_TASKS)
def test_no_door_imports_what_a_row_names(path, admin_client, nothing_runs):
    id_ = write_row(path, nothing_runs)
    page = reverse("admin:django_pglock_task_change", args=[id_])
    for url in (reverse("admin:django_pglock_task_changelist") + f"?task_path={path}&q={path}", page):
        assert admin_client.get(url).status_code == 200
    for verb in ("cancel", "retry"):
        assert admin_client.post(f"{page.removesuffix('change/')}do/{verb}/", follow=True).status_code == 200
    for command in (["status"], ["list", "--task", path], ["show", str(id_)], ["show", str(id_), "--json"]):
        call_command("locktasks", *command, stdout=io.StringIO())
    call_command("locktasks", "cancel", str(id_), stdout=io.StringIO())
    with pytest.raises(TaskResultDoesNotExist, match="does not know"):
        task_backends["default"].get_result(str(id_))
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO django_pglock_schedule (task_path, expression, timezone, next_at) "
            "VALUES (%s, '* * * * *', 'UTC', now())",
            [path],
        )
    schedules = reverse("admin:django_pglock_schedule_changelist")
    chosen = {"_selected_action": [path]}
    assert admin_client.post(schedules, {"action": "run_now", **chosen}, follow=True).status_code == 200
    assert Task.objects.count() == 1


def test_enqueue_takes_a_decorated_function_and_no_name(nothing_runs):
    backend = task_backends["default"]
    for path in NOT_TASKS:
        with pytest.raises(InvalidTask, match="not made for this backend"):
            backend.enqueue(path, [nothing_runs], {})
    for function in (os.system, lambda: None):
        with pytest.raises(InvalidTask, match="not made for this backend"):
            backend.enqueue(function, [nothing_runs], {})
    assert not Task.objects.exists()


def test_the_class_of_an_exception_is_not_imported_for_a_row(nothing_runs):
    result = sample.nothing.enqueue()
    Task.objects.filter(pk=result.id).update(attempts=3)

    def errors_with(*paths):
        Attempt.objects.all().delete()
        for number, path in enumerate(paths):
            Attempt.objects.create(
                task_id=result.id, number=number, worker=uuid4(), started_at=Now(), finished_at=Now(),
                outcome="FAILED", exception_path=path, traceback="",
            )  # fmt: skip
        return sample.nothing.get_result(result.id).errors

    [error] = errors_with("builtins.ValueError")
    assert error.exception_class is ValueError
    for error in errors_with("tests.sample.evil.Error", "tests.sample.evil", "this.s", "nowhere", ""):
        with pytest.raises(ImportError, match="not loaded"):
            _ = error.exception_class
    for error in errors_with("os.system", "tests.db.test_security.not_decorated"):
        with pytest.raises(ValueError, match="no exception"):
            _ = error.exception_class


@pytest.mark.parametrize(
    "fields",
    [
        {"backend": "no such backend"},
        {"meta": '["no object"]'},
        {"meta": '{"options": 5}'},
        {"meta": '{"options": {"timeout": "x"}}'},
        {"kwargs": "[1]"},
        {"kwargs": "null"},
    ],
    ids=str,
)
def test_a_row_that_makes_no_sense_harms_no_other(fields, worker, eventually, monkeypatch):
    heard = []
    receiver = lambda **kwargs: heard.append(kwargs["task_result"].id)  # noqa: E731 - kept by this name
    task_finished.connect(receiver)
    try:
        ids = [write_row("tests.sample.tasks.nothing", **each) for each in (fields, {}, fields, {})]
        worker()
        done = Task.objects.filter(pk__in=ids, finished_at__isnull=False)
        eventually(lambda: done.count() == 4)
        eventually(lambda: {str(ids[1]), str(ids[3])} <= set(heard))
    finally:
        task_finished.disconnect(receiver)
    assert set(Task.objects.filter(pk__in=ids[1::2]).values_list("status", flat=True)) == {"SUCCESSFUL"}
