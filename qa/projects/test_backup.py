"""The page about backups: a database with tasks in every status is dumped while a worker works, and restored."""

from __future__ import annotations

import os
import subprocess

import pytest

from example_project.postgres import find_programs
from qa.projects.conftest import server
from tests.conftest import ROOT
from tests.docs.test_docs import blocks

pytestmark = pytest.mark.acceptance

TASKS = """
import os
import time

from django_pglock import task

@task
def greet(name):
    return name

@task
def fail():
    raise ValueError

@task(lock="order:{number}")
def ship(number):
    return number

@task
def wait_for_the_dump():
    while not os.path.exists(os.environ["DUMPED"]):
        time.sleep(0.01)
"""
FILL = """
from datetime import timedelta
from django.utils import timezone
from django_pglock.models import Queue, Task
from shop.tasks import fail, greet, ship, wait_for_the_dump

wait_for_the_dump.enqueue()
greet.enqueue("successful")
fail.enqueue()
# Nothing of this queue is claimed before the database is restored.
Queue.objects.pause("later")
cancelled = greet.using(queue_name="later").enqueue("cancelled")
Task.objects.filter(pk=cancelled.id).cancel()
greet.using(queue_name="later", run_after=timezone.now() + timedelta(days=1)).enqueue("scheduled")
ship.using(queue_name="later").enqueue(5)
ship.using(queue_name="later").enqueue(5)
"""
RERUN = "SELECT status, attempts, rescues FROM django_pglock_task WHERE task_path LIKE '%wait_for_the_dump'"
STATES = "SELECT status, count(*) FROM django_pglock_task GROUP BY status"


@pytest.fixture
def dump_and_restore(tmp_path):
    """Do what the page says, with these names of databases in place of the page's."""
    [commands] = [code for code in blocks(ROOT / "docs" / "worker.md", "console") if "pg_dump" in code]
    settings = {name: str(value) for name, value in server("").items() if value}
    names = {"PGHOST": "HOST", "PGPORT": "PORT", "PGUSER": "USER", "PGPASSWORD": "PASSWORD"}
    environment = {name: settings[key] for name, key in names.items() if key in settings}

    environment["PATH"] = f"{find_programs()}{os.pathsep}{os.environ['PATH']}"

    def run(name, copy):
        lines = commands.replace("shop_copy", "COPY").replace("shop", name).replace("COPY", copy)
        for line in lines.splitlines():
            subprocess.run(line, shell=True, check=True, cwd=tmp_path, env={**os.environ, **environment})

    return run


def states(made):
    with made.session() as session:
        return dict(session.execute(STATES).fetchall())


def rerun(made):
    with made.session() as session:
        return session.execute(RERUN).fetchone()


def test_a_restored_database_continues(project, dump_and_restore, worker_process, eventually, tmp_path):
    made = project(settings='INSTALLED_APPS = ["django_pglock", "shop"]', shop__tasks=TASKS)
    made.manage("migrate", "-v0")
    made.python(FILL)
    here = {"DJANGO_SETTINGS_MODULE": "settings", "PYTHONPATH": str(made.folder), "DUMPED": str(tmp_path / "dumped")}
    worker = worker_process("--threads", "2", **here)
    every = {"SUCCESSFUL": 1, "FAILED": 1, "CANCELLED": 1, "RUNNING": 1, "SCHEDULED": 1, "READY": 1, "BLOCKED": 1}
    eventually(lambda: states(made) == every)

    copy = f"{made.database}_copy"
    dump_and_restore(made.database, copy)
    (tmp_path / "dumped").touch()
    eventually(lambda: "RUNNING" not in states(made), why=worker.output)
    worker.end()

    made.write(settings=(made.folder / "settings.py").read_text().replace(made.database, copy))
    made.database = copy
    assert states(made) == every, "the copy is of the moment of the dump, and the other worker does not work there"
    worker_process("--threads", "2", **here)
    eventually(lambda: rerun(made) == ("SUCCESSFUL", 2, 1))
    made.manage("locktasks", "resume", "later")
    after = {"SUCCESSFUL": 4, "FAILED": 1, "CANCELLED": 1, "SCHEDULED": 1}
    eventually(lambda: states(made) == after)
