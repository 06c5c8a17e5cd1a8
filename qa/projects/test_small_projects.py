"""Projects with as little else installed as can be: this app alone, or only its locks and not the app."""

from __future__ import annotations

import subprocess

import pytest

from qa.projects.conftest import Project

pytestmark = pytest.mark.acceptance


@pytest.fixture(autouse=True)
def new_interpreters(monkeypatch):
    """These tests are about what is imported, so nothing is imported before."""
    monkeypatch.setattr(Project, "start", subprocess.Popen)


JOBS = """
from django_pglock import task

@task(lock="order:{number}")
def ship(number):
    return number
"""


def test_the_app_works_alone(project):
    """Without content types, auth and admin: no import, no signal and no check may need them."""
    made = project(jobs=JOBS)
    shown = made.python(
        """
        from django.core.management import call_command

        call_command("check", databases=["default"], fail_level="WARNING")
        call_command("migrate", verbosity=0)
        call_command("makemigrations", check_changes=True, dry_run=True)
        from django_pglock import Lease, LockNotAvailable, lock
        from django_pglock.models import Task
        from django_pglock.testing import hold
        from django_pglock.worker import Worker
        from jobs import ship

        result = ship.enqueue(5)
        Worker(threads=1, drain=True).run()
        result.refresh()
        assert result.return_value == 5
        with hold("order:5"), Lease("report", ttl=60):
            try:
                lock("order:5", timeout=0).acquire()
            except LockNotAvailable as error:
                print([row.application_name for row in error.holders()])
            call_command("locks")
            call_command("locks", leases=True)
        call_command("locktasks", "status")
        """
    )
    assert "no issues" in shown
    assert "No changes detected" in shown
    assert "['django_pglock.testing']" in shown
    assert "report" in shown
    assert "No task is waiting, running or failed." in shown
    assert "worked" in made.manage("withlock", "order:5", "--", "echo", "worked")
    made.manage("runlockworker", "--drain")


LOCKS = """
import asyncio

from django.db import transaction
from django.http import HttpResponse
from django.test import RequestFactory
from django.urls import path

from django_pglock import LockNotAvailable, lock, lock_all, lock_timeout, lock_view, semaphore, try_lock
from django_pglock.testing import assert_locked, assert_no_locks, hold

async def alock():
    async with lock("async"):
        assert_locked_in_thread = await asyncio.to_thread(assert_locked, "async")

@lock_view("order:{number}", timeout=0)
def view(request, number):
    return HttpResponse("done")

with lock("order", 5), try_lock("other") as held, lock_all("a", "b"), semaphore("few", limit=2):
    assert held
    assert_locked("order:5")
with transaction.atomic(), lock("order:5"), lock_timeout(1):
    assert_locked("order:5")
asyncio.run(alock())
request = RequestFactory().get("/")
assert view(request, number=5).status_code == 200
with hold("order:5"):
    assert view(request, number=5).status_code == 409
"""
#: Operations that need the app's tables.
NEEDS_THE_APP = {
    "holders": """
        with hold("order:5"):
            try:
                lock("order:5", timeout=0).acquire()
            except LockNotAvailable as error:
                error.holders()
    """,
    "enqueue": "from jobs import ship; ship.enqueue(5)",
    "enqueue_many": "from jobs import ship; import django_pglock; django_pglock.enqueue_many(ship, [{'number': 5}])",
    "get_result": "from jobs import ship; ship.get_result('5')",
    "models": "from django_pglock.models import Task",
    "lease": "from django_pglock import Lease; Lease('x', ttl=5).acquire()",
    "worker": "from django_pglock.worker import Worker; Worker()",
    "command": "from django_pglock.management.commands.locktasks import Command",
}


ASK = """
from textwrap import dedent
from django_pglock.errors import ConfigurationError
from locking import *

for name, code in NEEDS_THE_APP.items():
    try:
        exec(dedent(code))
    except ConfigurationError as error:
        print(name, error)
"""


def test_locks_work_without_the_app(project):
    """``import django_pglock`` and a PostgreSQL: no table is needed, and no app."""
    made = project(settings="INSTALLED_APPS = []\nROOT_URLCONF = None", jobs=JOBS, locking=LOCKS)
    lines = made.python(f"NEEDS_THE_APP = {NEEDS_THE_APP!r}\n{ASK}").splitlines()
    assert [line.split()[0] for line in lines] == list(NEEDS_THE_APP)
    for line in lines:
        assert "'django_pglock' to INSTALLED_APPS" in line, line
        assert "manage.py migrate" in line, line


def test_without_psycopg_3_the_first_message_says_what_to_install(project):
    """A module of this name is found before the installed one. Django alone would work with psycopg2."""
    made = project(psycopg="raise ModuleNotFoundError(\"No module named 'psycopg'\")")
    said = made.manage("check", fails=True).splitlines()[-1]
    assert "django_pglock needs psycopg 3, and the import of psycopg failed: No module named 'psycopg'." in said
    assert "python -m pip install 'psycopg[binary]>=3.2'" in said
