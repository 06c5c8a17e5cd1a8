"""``dumpdata`` and ``loaddata`` of a whole project."""

from __future__ import annotations

import json
from datetime import datetime

import pytest

from qa.projects.conftest import session_in

pytestmark = pytest.mark.acceptance

SETTINGS = """
INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "django_pglock", "shop"]
DATABASES = {"default": POSTGRES, "copy": {**POSTGRES, "NAME": "%s"}, "legacy": SQLITE}
BACKEND = "django_pglock.backend.PostgresBackend"
TASKS = {
    "default": {"BACKEND": BACKEND, "QUEUES": []},
    "copy": {"BACKEND": BACKEND, "QUEUES": [], "OPTIONS": {"database": "copy"}},
}
SILENCED_SYSTEM_CHECKS = ["django_pglock.W009"]
"""
TASKS = """
from django_pglock import Rate, Unique, task

@task
def greet(name):
    return {"hello": name}

@task
def fail():
    raise ValueError("no \\u00fc")

@task(lock="order:{number}")
def ship(number):
    return number

@task(unique=Unique("order:{number}", period=3600), rate=Rate(1, per=3600))
def once(number):
    return None

@task(every=3600)
def tidy():
    return None
"""
#: Something of each kind: finished, failed, running, and waiting for a date, for a key, for a token and for another
#: task. And rows that belong to this database only: of a worker, and of a lease and a lock that are held meanwhile.
FILL = """
from datetime import timedelta
from uuid import uuid4

from django.core.management import call_command
from django.utils import timezone

from django_pglock import Lease, lock
from django_pglock.models import Queue, Task
from django_pglock.worker import Worker as RunningWorker
from shop.tasks import fail, greet, once, ship
from tests.db.store.workers import beat

greet.enqueue("Ann")
fail.enqueue()
once.enqueue(1)
once.enqueue(2)
RunningWorker(using="default", threads=1, drain=True).run()
Queue.objects.pause("default", reason="for the dump")
first = greet.enqueue(name="B\\u00f6rn")
greet.using(after=[first]).enqueue("Cid")
greet.using(run_after=timezone.now() + timedelta(days=1)).enqueue("Dot")
ship.enqueue(5)
ship.enqueue(5)
running = greet.enqueue("Fay")
Task.objects.filter(pk=running.id).update(
    status="RUNNING", worker=uuid4(), attempts=1, started_at=timezone.now(), last_attempted_at=timezone.now()
)
beat(
    "default", uuid4(), name="alive", hostname="here", pid=1, queues=[], threads=1, is_stopping=False, task_paths=[]
)
with lock("order:5"), Lease("report", ttl=60):
    call_command("dumpdata", output="dump.json", verbosity=0)
    call_command("dumpdata", output="all.json", use_base_manager=True, verbosity=0)
"""
#: Round trip; the names of the columns by which the rows are put in order.
KEPT = {"task": "id", "attempt": "id", "queue": "name", "schedule": "task_path", "waiter": "id", "ratelimit": "key"}
OURS = {*KEPT, "worker", "lease", "advisorylock"}


COLLISIONS = """
SELECT count(*) FROM django_pglock_{table}
WHERE id >= nextval(pg_get_serial_sequence('django_pglock_{table}', 'id'))
"""


def models_in(dump):
    return {row["model"].rpartition(".")[2] for row in json.loads(dump.read_text())}


def rows_of(database, table, key):
    """Return the rows, with dates as Django writes them in JSON: in milliseconds."""
    with session_in(database) as session:
        rows = session.execute(f"SELECT * FROM django_pglock_{table} ORDER BY {key}").fetchall()
    return [[in_milliseconds(value) for value in row] for row in rows]


def in_milliseconds(value):
    return value.replace(microsecond=value.microsecond // 1000 * 1000) if isinstance(value, datetime) else value


@pytest.fixture
def filled(project):
    made, copy = project(), project()
    made = project(settings=SETTINGS % copy.database, shop__tasks=TASKS)
    made.manage_each(*(f"migrate -v0 --database {alias}" for alias in ("default", "copy", "legacy")))
    made.python(FILL)
    return made, copy


def test_a_project_is_dumped_and_loaded(filled):
    """Loaded tasks continue. Rows about sessions and workers of one database are not dumped."""
    made, copy = filled
    assert models_in(made.folder / "dump.json") & OURS == set(KEPT)
    assert OURS - models_in(made.folder / "all.json") == {"advisorylock"}, "--all means all tables, and a view is none"

    made.manage("loaddata", "-v0", "--database", "copy", "dump.json")
    for table, key in KEPT.items():
        assert (rows := rows_of(made.database, table, key)), f"{table} is empty, so nothing is shown"
        assert rows_of(copy.database, table, key) == rows, table
    with copy.session() as session:
        for table in (name for name, key in KEPT.items() if key == "id"):
            assert session.execute(COLLISIONS.format(table=table)).fetchone() == (0,), f"new ids of {table}"

    made.python(
        """
        from django_pglock.models import Queue, Task
        from django_pglock.store.rescue import rescue
        from shop.tasks import greet
        tasks = Task.objects.using("copy")
        rescued = [each.id for each in rescue("copy", unbroken=60)]
        assert [task.args for task in tasks.filter(pk__in=rescued)] == [["Fay"]]
        last = tasks.order_by("id").last().pk
        new = greet.using(backend="copy").enqueue("Eve")
        assert int(new.id) > last, (new.id, last)
        Queue.objects.db_manager("copy").resume("default")
        """
    )
    made.manage("runlockworker", "--drain", "--database", "copy")
    with copy.session() as session:
        done = session.execute("SELECT count(*) FROM django_pglock_task WHERE status = 'SUCCESSFUL'").fetchone()
    # Ann, the first of two of a rate, Björn, Cid after him, both of order 5, Eve, and Fay for the second time.
    assert done == (8,)


def test_a_database_that_is_not_postgresql_is_dumped_without_us(project):
    """dumpdata reads each model in each database, also if the model has no table there."""
    made = project(settings=SETTINGS % "copy", shop__tasks=TASKS)
    made.manage("migrate", "-v0", "--database", "legacy")
    dumped = json.loads(made.manage("dumpdata", "--database", "legacy"))
    assert {row["model"].partition(".")[0] for row in dumped} == {"contenttypes", "auth"}
