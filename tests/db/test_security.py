"""Rows, names and values from outside cannot run code, imitate keys or use more rights."""

from __future__ import annotations

import builtins
import io
import json
import math
import os
import re
import sys
from datetime import timedelta
from uuid import uuid4

import pytest
from django.core.management import call_command
from django.db import connection, connections
from django.db.models.functions import Now
from django.urls import reverse

from django_pglock import Lease, Unique, enqueue_many, lock, task
from django_pglock.errors import LockKeyError
from django_pglock.keys import make_key
from django_pglock.keys.template import KeyTemplate
from django_pglock.locks.views import lock_view
from django_pglock.models import AdvisoryLock, Attempt, Schedule, Task
from django_pglock.postgres.sessions import dedicated_connection
from django_pglock.store.liveness import delete_dead
from django_pglock.tasks.call_keys import LONGEST_KEY, keys_of
from django_pglock.tasks.claim import Claim
from django_pglock.tasks.compat import InvalidTask, TaskResultDoesNotExist, task_backends, task_finished
from tests.conftest import ROOT
from tests.db.store.schedules import register
from tests.db.store.workers import beat
from tests.db.test_names import KEYED
from tests.db.worker.conftest import run_to_its_end
from tests.sample import keyed_tasks as keyed
from tests.sample import scheduled
from tests.sample import tasks as sample
from tests.sample.models import Effect
from tests.sql import execute_sql

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
    "tests.evil.anything",
    "tests.evil",
    "",
]


@pytest.fixture
def nothing_runs(monkeypatch, tmp_path):
    """Record whatever runs or is imported that must not be. Imports of named tuples evaluate, with a namespace."""
    proof = tmp_path / "proof"
    for module, name in ((os, "system"), (builtins, "eval")):
        monkeypatch.setattr(module, name, lambda *args, call=eval: call(*args) if args[1:] else proof.write_text("ran"))
    modules = set(sys.modules)
    yield f"touch {proof}"
    assert "tests.evil" not in sys.modules
    assert not {each for each in set(sys.modules) - modules if each.startswith(("tests.evil", "tests.sample", "this"))}
    assert not proof.exists()
    assert not Effect.objects.filter(name="ran").exists()


def write_row(path, argument="x", **fields):
    """A row that any role with the right to write the table can make."""
    columns = {"status": "READY", "queue": "default", "backend": "default", "task_path": path, **fields}
    columns["args"] = json.dumps([argument])
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO django_pglock_task ({', '.join(columns)}) VALUES ({', '.join(['%s'] * len(columns))}) "
            "RETURNING id",
            list(columns.values()),
        )
        return cursor.fetchone()[0]


def test_a_worker_does_not_import_or_run_the_task_path_of_a_row(worker, eventually, nothing_runs):
    ids = [write_row(path, nothing_runs) for path in NOT_TASKS]
    execute_sql(
        "INSERT INTO django_pglock_schedule (name, task_path, expression, timezone, next_at) "
        "SELECT path, path, '* * * * *', 'UTC', now() - interval '1 minute' "
        "FROM unnest(%s::text[]) AS path",
        [NOT_TASKS],
    )
    worker()
    for number in range(20):
        known = sample.nothing.enqueue(number)
        eventually(lambda id_=known.id: Task.objects.filter(pk=id_, status="SUCCESSFUL").exists())
    assert set(Task.objects.filter(pk__in=ids).values_list("status", "attempts")) == {("READY", 0)}
    assert Task.objects.count() == len(ids) + 20, "no schedule of theirs was kept"


def test_a_claim_on_a_path_that_is_no_task_fails_and_imports_nothing(nothing_runs):
    """This also holds if a worker gets such a claim by another way."""
    from django_pglock.worker.child.run import prepare

    for path in NOT_TASKS:
        text = json.dumps([nothing_runs])
        claim = Claim(1, 1, uuid4(), "default", "default", 0, path, text, "{}", "{}", 0, 0, 0, None, "", "", "")
        ended = prepare(claim, "default")
        assert ended.outcome.status == "FAILED"
        assert "is not registered" in ended.outcome.failure.traceback


@pytest.mark.parametrize("path", NOT_TASKS)
def test_admin_and_commands_do_not_import_the_task_path_of_a_row(path, admin_client, nothing_runs):
    id_ = write_row(path, nothing_runs)
    page = reverse("admin:django_pglock_task_change", args=[id_])
    for url in (reverse("admin:django_pglock_task_changelist") + f"?task_path={path}&q={path}", page):
        assert admin_client.get(url).status_code == 200
    for verb in ("cancel", "retry"):
        assert admin_client.post(f"{page.removesuffix('change/')}do/{verb}/", follow=True).status_code == 200
    for command in (["status"], ["list", "--task", path], ["show", str(id_)], ["show", str(id_), "--json"]):
        call_command("locktasks", *command, stdout=io.StringIO())
    call_command("locktasks", "cancel", str(id_), stdout=io.StringIO())
    with pytest.raises(TaskResultDoesNotExist, match="has not imported"):
        task_backends["default"].get_result(str(id_))
    execute_sql(
        "INSERT INTO django_pglock_schedule (name, task_path, expression, timezone, next_at) "
        "VALUES (%s, %s, '* * * * *', 'UTC', now())",
        [path, path],
    )
    schedules = reverse("admin:django_pglock_schedule_changelist")
    chosen = {"_selected_action": [path]}
    assert admin_client.post(schedules, {"action": "run_now", **chosen}, follow=True).status_code == 200
    assert Task.objects.count() == 1


def test_enqueue_takes_a_decorated_function_and_no_name(nothing_runs):
    backend = task_backends["default"]
    for path in NOT_TASKS:
        with pytest.raises(InvalidTask, match="not a task of this backend"):
            backend.enqueue(path, [nothing_runs], {})
    for function in (os.system, lambda: None):
        with pytest.raises(InvalidTask, match="not a task of this backend"):
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
    for error in errors_with("tests.evil.Error", "tests.evil", "this.s", "nowhere", ""):
        with pytest.raises(ImportError, match="not imported"):
            _ = error.exception_class
    for error in errors_with("os.system", "tests.db.test_security.not_decorated"):
        with pytest.raises(ValueError, match="not an exception"):
            _ = error.exception_class


INVALID_ROWS = [
    {"backend": "no such backend"},
    {"meta": '["no object"]'},
    {"meta": '{"options": 5}'},
    {"meta": '{"options": {"timeout": "x"}}'},
    {"kwargs": "[1]"},
    {"kwargs": "null"},
    {"attempts": 2**31 - 1, "uncounted": 2**31 - 1, "rescues": 2**15 - 1},
    {"attempts": 2**31 - 1, "fair_key": "x"},
]


def test_a_malformed_row_does_not_prevent_other_tasks_from_running(worker, eventually):
    heard = []
    receiver = lambda **kwargs: heard.append(kwargs["task_result"].id)  # noqa: E731 - kept by this name
    task_finished.connect(receiver)
    try:
        rows = [each for fields in INVALID_ROWS for each in (fields, {}, fields, {})]
        ids = [write_row("tests.sample.tasks.nothing", **each) for each in rows]
        worker()
        eventually(lambda: Task.objects.filter(pk__in=ids, finished_at__isnull=False).count() == len(rows))
        eventually(lambda: set(map(str, ids[1::2])) <= set(heard))
    finally:
        task_finished.disconnect(receiver)
    assert set(Task.objects.filter(pk__in=ids[1::2]).values_list("status", flat=True)) == {"SUCCESSFUL"}


# Keys that are made of values from outside


def of_two(a, b): ...


def of_user(name): ...


def test_a_value_of_a_key_template_cannot_imitate_other_parts():
    name = KeyTemplate("cart:{a}:{b}", known=None, where="here").render
    assert name({"a": "a:b", "b": "c"}) != name({"a": "a", "b": "b:c"})
    assert name({"a": "a%3Ab", "b": "c"}) != name({"a": "a:b", "b": "c"})
    assert name({"a": "a", "b": "b"}) == "cart:a:b"
    numbers = {make_key(*parts).number for parts in (("a:b", "c"), ("a", "b:c"), ("a:b:c",), ("a", "b", "c"))}
    # A name given as one string is not escaped: it comes from the program, and means "a", "b", "c".
    assert len(numbers) == 3


@pytest.mark.parametrize("template", ["{a}", "{a}:x", "cart{a}", "cart-{a}", "cart:{a}{b}", "cart:{a}-{b}", "{a}:{b}"])
def test_an_ambiguous_key_template_is_refused(template):
    for decorate in (lock_view(template), lock(template), Lease(template, ttl=60)):
        with pytest.raises(LockKeyError, match="has no colon before"):
            decorate(lambda request, a, b: None)
    with pytest.raises(LockKeyError, match="has no colon before"):
        task(lock=template)(of_two)


CRAFTED = [
    "ledger",
    "%rate x",
    "%group x y",
    "a:b",
    "%3A",
    "order:1",
    "order%3A1",
    " ",
    "pglock",
    "x" * 400,
    "é" * 1000,
]


def test_no_argument_makes_the_key_of_another_function(own_registry):
    """No value makes the key of a rate, a group or a constant, or the key of other arguments."""

    mine = task(lock="user:{name}", unique="{name}")(of_user)
    own = [keys_of(mine, (value,), {}) for value in CRAFTED]
    others = {"ledger", "user", "user:a:b"}
    others |= {keys_of(keyed.trickle, (), {"tenant": value}).lock for value in CRAFTED}
    others |= {keys_of(keyed.digest, (), {"user": value}).lock for value in CRAFTED}
    others |= {keys_of(keyed.drip, (), {}).lock}
    assert not others & {each.lock for each in own}
    assert len({each.lock for each in own}) == len({each.unique for each in own}) == len(CRAFTED)
    assert all(each.unique.startswith("tests.db.test_security.") for each in own)


def test_a_value_cannot_make_the_shortened_key_of_a_long_value():
    long = keys_of(keyed.step, ("x" * 1000, 1), {}).lock
    assert len(long) == LONGEST_KEY
    crafted = long.removeprefix("order:")
    assert keys_of(keyed.step, (crafted, 1), {}).lock != long
    assert len({keys_of(keyed.step, ("x" * size, 1), {}).lock for size in range(380, 520)}) == 140


def test_a_task_with_a_key_of_the_greatest_length_is_stored_and_admitted(own_registry):
    for function in (keyed.step, keyed.trickle, keyed.serve, keyed.rebuild):
        function.enqueue("𝄞" * 5000)
    keyed.digest.enqueue(user="𝄞" * 5000, text="x")
    assert set(Task.objects.values_list("status", flat=True)) == {"READY"}


def test_no_key_of_a_task_meets_an_advisory_lock_of_the_program(other_session):
    """PostgreSQL's hash is not cryptographic: an attacker could find a value with the number of a given lock."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT hashtextextended('django_pglock order:crafted', 0)")
        [number] = cursor.fetchone()
        other_session(f"SELECT pg_advisory_lock({number})")
        cursor.execute("SET lock_timeout = 2000")
        try:
            keyed.step.enqueue("crafted")
        finally:
            cursor.execute("SET lock_timeout = 0")
    assert Task.objects.get().status == "READY"


# What a role needs


@pytest.fixture
def as_role():
    """Make roles with just the rights that docs/worker.md names, and connect as one of them."""
    page = (ROOT / "docs" / "worker.md").read_text()
    name = f"pglock_{os.getpid()}"  # roles belong to the server, not to the tests' database
    grants = re.sub(r"TO (app|worker);", rf"TO {name}_\1;", page)
    app, besides = re.findall(r"```sql\n(GRANT.*?)```", grants, re.DOTALL)
    settings = connection.settings_dict
    before = settings["OPTIONS"]
    with connection.cursor() as cursor:
        cursor.execute(f"CREATE ROLE {name}_app; CREATE ROLE {name}_worker IN ROLE {name}_app")
        cursor.execute(app)
        cursor.execute(besides)
        # Of the tests' own functions.
        cursor.execute(f"GRANT SELECT, INSERT ON sample_effect TO {name}_app")

    def connect(role):
        connections.close_all()
        settings["OPTIONS"] = {**before, **({"options": f"-c role={name}_{role}"} if role else {})}

    yield connect
    connect(None)
    execute_sql(f"DROP OWNED BY {name}_app, {name}_worker; DROP ROLE {name}_worker, {name}_app")


@pytest.mark.parametrize("has_some_rights", [True, False])
def test_a_draining_worker_whose_role_lacks_rights_ends(as_role, caplog, has_some_rights):
    """A command of cron or CI would run forever. A worker without --drain waits for the rights."""
    sample.nothing.enqueue()
    if not has_some_rights:
        execute_sql(f"REVOKE ALL ON ALL TABLES IN SCHEMA public FROM pglock_{os.getpid()}_app")
    as_role("app")
    worker = run_to_its_end(drain=True)
    assert worker.left_behind
    assert "This worker ends, because its role lacks a right: permission denied for table" in caplog.text
    as_role(None)
    assert Task.objects.get().status == "READY"


def test_the_rights_that_the_documentation_names_are_enough(as_role, worker, eventually, own_registry):
    task(every=3600)(scheduled.nightly)
    as_role("app")
    done = sample.record.enqueue("a")
    sample.record_atomically.enqueue("b")
    failed = sample.fail_twice.enqueue("c")
    sample.record.using(after=[done]).enqueue("d")
    sample.record.using(after=[failed], run_after=timedelta(seconds=0.1), keep_result=0).enqueue("e")
    for enqueue, _ in KEYED.values():
        enqueue("7")
    keyed.save.enqueue(1)
    keyed.save.enqueue(1)
    keyed.remind.using(unique=Unique("{number}", period=1)).enqueue(1)
    enqueue_many(sample.nothing, range(3))
    enqueue_many(keyed.refresh, range(3))
    with lock("a"), Lease("a", ttl=60):
        assert AdvisoryLock.objects.held().exists()
    late = sample.nothing.using(run_after=timedelta(hours=1)).enqueue()
    assert [Task.objects.filter(pk=late.id).cancel(), Task.objects.filter(pk=late.id).retry()] == [1, 1]
    as_role("worker")
    write_row("os.system", status="RUNNING", worker=uuid4(), attempts=1, last_attempted_at="2020-01-01")
    somebody = {"name": "w", "hostname": "h", "pid": 1, "queues": [], "threads": 1, "is_stopping": False}
    beat("default", uuid4(), **somebody)
    register()
    assert Schedule.objects.get().pk == "tests.sample.scheduled.nightly"
    worker(queues=["default"])
    waiting = Task.objects.filter(finished_at=None).exclude(task_path="os.system")
    eventually(lambda: not waiting.exists())
    gone = Task.objects.filter(task_path="os.system", status="READY")
    eventually(gone.exists, why="it was not taken back from a worker that is gone")
    assert set(Task.objects.values_list("status", flat=True)) == {"SUCCESSFUL", "READY"}
    assert Task.objects.all().prune(older_than=0) > 10
    delete_dead("default", unbroken=math.inf)
    as_role("app")
    assert isinstance(sample.nothing.enqueue().id, str)
    with pytest.raises(TimeoutError):
        sample.nothing.using(queue_name="served by nobody").enqueue().wait(0.01)
